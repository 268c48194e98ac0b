"""What a run logs, for people and for other tools: one page, a table, event files."""
