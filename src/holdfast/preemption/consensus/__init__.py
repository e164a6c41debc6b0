"""How workers agree on the step at which all of them save and stop, and learn that one has failed."""
