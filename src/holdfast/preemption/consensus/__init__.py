"""The agreement of workers on the step at which all save and stop, and the news that one has failed."""
