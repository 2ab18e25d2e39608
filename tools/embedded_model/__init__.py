"""How the embedded model was made: tokenizer, corpus, training loop, export with evaluation."""
