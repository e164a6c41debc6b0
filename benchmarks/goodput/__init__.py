"""How much of its time a job trains that is killed again and again, by what saves it and what starts it again."""
