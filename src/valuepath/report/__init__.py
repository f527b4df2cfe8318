"""What a study found, for people: a table in the terminal, CSV, Markdown, a page. Reads ``StudyResults`` and nothing else."""
