"""Calibrate cache methods. Run a model over samples of a text, record every layer's keys and values
and the gradients of the loss with respect to them, fit the method's parameters, and save them to a
file.

    samples.py      windows of a text
    activations.py  the rows and gradients of one sample, layer by layer
    store.py        the work directory that holds them, and what a run has finished
    fit.py          `calibrate`, which runs all of it
    file.py         `Calibration`, and its safetensors file
"""
