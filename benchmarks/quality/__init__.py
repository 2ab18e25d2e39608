"""What caches do to a model's predictions: tables of papers, and our own."""
