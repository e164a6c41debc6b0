"""Sources of preemption notices: signals, schedulers, clouds, a file, a function. Each source is one small class."""
