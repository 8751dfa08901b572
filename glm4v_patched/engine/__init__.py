"""Preparation of a model for training or inference: trained weights, memory, kernels, ZeRO.

Nothing here depends on the Trainer or on data.
"""
