"""What happened and what now, in words: reads only, writes nothing."""
