"""The only place where a framework is imported: one package for each."""
