"""Where the time of a step goes, and what more workers would make of it."""
