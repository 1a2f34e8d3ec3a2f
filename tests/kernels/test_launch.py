"""How kernels that were compiled beforehand are brought onto the GPU."""

from __future__ import annotations

from types import SimpleNamespace

from slipstream.kernels.launch import group_by_launcher


def kernel(name, constants=(), **signature):
    source = SimpleNamespace(signature=signature, constants=dict.fromkeys(constants, 1))
    compiled = SimpleNamespace(name=name, src=source)
    return SimpleNamespace(result=lambda: compiled)


def test_kernels_that_share_a_launcher_are_loaded_one_after_the_other():
    """Two builds of the same library at a time make Python take a later one for it."""

    def fail():
        raise ValueError("does not compile")

    kernels = [
        kernel("forward", x="*fp16", size="i32"),
        kernel("other values", x="*fp16", size="i32"),
        kernel("other types", x="*fp32", size="i32"),
        kernel("a constant", [(1,)], x="*fp16", size="i32"),
        SimpleNamespace(result=fail),
    ]
    names = [[compiled.name for compiled in group] for group in group_by_launcher(kernels)]
    assert names == [["forward", "other values"], ["other types"], ["a constant"]]
