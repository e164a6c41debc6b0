"""Integrations of frameworks, one package for each: the only modules that import a framework."""
