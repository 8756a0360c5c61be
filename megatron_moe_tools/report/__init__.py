"""report.html: one or several runs as one page that needs no network. Nothing here imports torch."""
