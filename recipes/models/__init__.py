"""Models: loading, attention per document, adapters, token scores, export. What is sound: docs/models.md."""
