"""A layout on paper: what a model costs on ranks that are not here."""
