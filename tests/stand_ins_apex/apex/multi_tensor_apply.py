"""Applies a kernel to lists of tensors."""


def multi_tensor_applier(function, overflow, tensor_lists, *arguments):
    return function(2048 * 32, overflow, tensor_lists, *arguments)
