"""The verbs of the command, one module each, imported when the verb is called."""
