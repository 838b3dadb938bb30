"""Which experts a data set uses: recorded, chosen from, and compared before and after a run."""
