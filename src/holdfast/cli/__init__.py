"""The command `holdfast`, one module a verb; each verb is imported when it is called."""
