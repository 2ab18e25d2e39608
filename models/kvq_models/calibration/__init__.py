"""Calibration of cache methods: running a model over samples of a text, recording the keys and values of every layer and the gradients of
the loss in them, fitting the method's parameters to them, and keeping those in a file.

    samples.py      windows of a text
    activations.py  the rows and gradients of one sample, layer by layer
    store.py        the work directory that holds them, and what a run has finished
    fit.py          `calibrate`, the whole of it
    file.py         `Calibration`, and its safetensors file
"""
