"""Continue from earlier results (`adapt.start_from`): load a PEFT adapter or a delta into an adapted model."""
