"""ONNX programs of the modules, run by ONNX Runtime at sizes that they were not exported with."""

import pytest
import torch

from talk_fairseq import TaLKConv, TaLKConvUnit

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

ANY = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}  # two axes of any size


def session(module, path, inputs):
    """Export `module` for two axes of any size, and load what is written."""
    program = torch.onnx.export(
        module, inputs, dynamo=True, dynamic_shapes=(ANY,) * len(inputs), verbose=False
    )
    program.save(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(session, *inputs):
    names = [value.name for value in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, (i.numpy() for i in inputs))))[0])


@torch.no_grad()
@pytest.mark.parametrize("dtype, max_right", [(torch.float32, 3), (torch.float64, 0)])
def test_the_operator_in_a_layer(tmp_path, dtype, max_right):
    conv = TaLKConv(12, 3, 5, max_right, spread=True).to(dtype).eval()
    exported = session(conv, tmp_path / "conv.onnx", (torch.randn(9, 2, 12, dtype=dtype),))
    for T, B in ((9, 2), (1, 1), (2, 3), (400, 2)):
        x = torch.randn(T, B, 12, dtype=dtype) + 1
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        assert torch.allclose(run(exported, x), conv(x), rtol=tolerance, atol=tolerance)


class Unit(torch.nn.Module):
    """A unit that takes its mask by place, as an exported program does."""

    def __init__(self):
        super().__init__()
        self.unit = TaLKConvUnit(12, 3, 5, 4, short_kernel=3)

    def forward(self, x, padding):
        return self.unit(x, key_padding_mask=padding)[0]


@torch.no_grad()
def test_a_unit_with_padding(tmp_path):
    unit = Unit().eval()

    def batch(T, B):
        return torch.randn(T, B, 12), torch.arange(T) >= torch.arange(1, B + 1).unsqueeze(1) * T / B

    exported = session(unit, tmp_path / "unit.onnx", batch(9, 2))
    for size in ((9, 2), (2, 2), (60, 3)):
        inputs = batch(*size)
        assert torch.allclose(run(exported, *inputs), unit(*inputs), rtol=1e-5, atol=1e-6)


def test_the_old_exporter_is_refused(tmp_path):
    """It translates graphs of TorchScript, operator by operator."""
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="talk_conv::forward"):
        x = torch.randn(9, 2, 12)
        torch.onnx.export(TaLKConv(12, 3, 5), (x,), tmp_path / "conv.onnx", dynamo=False)
