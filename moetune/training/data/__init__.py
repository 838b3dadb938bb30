"""From files to rows of tokens: sources, records, chat templates, packing, and a look at what comes out."""
