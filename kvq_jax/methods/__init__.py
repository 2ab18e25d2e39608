"""One folder for each method: options, codec, README with the equations, the source and every deviation."""
