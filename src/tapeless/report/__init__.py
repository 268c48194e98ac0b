"""A run told to people and to other tools: one page, a table, event files."""
