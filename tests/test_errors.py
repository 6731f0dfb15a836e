"""Guarantee 8: bad input raises what F.conv2d raises, in its words, naming argument and shapes.

The exception type is F.conv2d's own at run time, of whatever torch is installed.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F

import conv2d_ext

X, W, B = (2, 4, 8, 9), (6, 4, 3, 3), (6,)
# Integers to Python, but not to F.conv2d.
BOOLS = (
    ("stride", True),
    ("padding", True),
    ("dilation", True),
    ("groups", True),
    ("stride", (True, 1)),
    ("padding", [False, 1]),
)


@dataclasses.dataclass(frozen=True)
class BadCall:
    """Shapes, keyword arguments, F.conv2d's phrase, and what the message must name besides."""

    name: str
    phrase: str
    names: tuple[str, ...]
    input: tuple[int, ...] = X
    weight: tuple[int, ...] = W
    bias: tuple[int, ...] | None = None
    kwargs: dict = dataclasses.field(default_factory=dict)

    def tensors(self):
        return [s if s is None else torch.randn(s) for s in (self.input, self.weight, self.bias)]


BAD_CALLS = (
    BadCall("input 2-D", "Expected 3D (unbatched) or 4D (batched) input to conv2d",
            ("input", "[8, 9]"), input=(8, 9)),
    BadCall("input 5-D", "Expected 3D (unbatched) or 4D (batched) input to conv2d",
            ("input", "[1, 2, 4, 8, 9]"), input=(1, 2, 4, 8, 9)),
    BadCall("input 0-D", "Expected 3D (unbatched) or 4D (batched) input to conv2d",
            ("input", "[]"), input=()),
    BadCall("weight 3-D", "", ("weight", "[6, 4, 3]"), weight=(6, 4, 3)),
    BadCall("weight 5-D", "", ("weight", "[6, 4, 3, 3, 3]"), weight=(6, 4, 3, 3, 3)),
    BadCall("weight 1-D", "weight should have at least three dimensions", ("[6]",), weight=(6,)),
    BadCall("channels", "Given groups=1, weight of size [6, 4, 3, 3], expected input[2, 5, 8, 9] "
            "to have 4 channels, but got 5 channels instead", (), input=(2, 5, 8, 9)),
    BadCall("channels, unbatched", "to have 4 channels, but got 5 channels instead",
            ("weight of size [6, 4, 3, 3]", "5, 8, 9]"), input=(5, 8, 9)),
    BadCall("channels by groups", "Given groups=2, weight of size [6, 4, 3, 3], expected input"
            "[2, 4, 8, 9] to have 8 channels, but got 4 channels instead", (),
            kwargs={"groups": 2}),
    BadCall("groups not dividing", "Given groups=2, expected weight to be divisible by 2 at "
            "dimension 0, but got weight of size", ("[5, 2, 3, 3]",), weight=(5, 2, 3, 3),
            kwargs={"groups": 2}),
    BadCall("fewer output channels than groups", "expected weight to be at least 4 at dimension 0",
            ("groups=4", "[2, 1, 3, 3]"), weight=(2, 1, 3, 3), kwargs={"groups": 4}),
    BadCall("no output channels", "expected weight to be at least 1 at dimension 0",
            ("[0, 4, 3, 3]",), weight=(0, 4, 3, 3)),
    BadCall("kernel without taps", "", ("kernel size should be greater than zero", "weight",
            "[6, 4, 0, 3]"), weight=(6, 4, 0, 3)),
    *(
        BadCall(f"groups {groups}", "non-positive groups is not supported", (str(groups),),
                kwargs={"groups": groups})
        for groups in (0, -1)
    ),
    *(
        BadCall(f"stride {stride}", "non-positive stride is not supported", ("stride=",),
                kwargs={"stride": stride})
        for stride in (0, -1, (1, 0), (0, 1), (-1, 1))
    ),
    *(
        BadCall(f"dilation {dilation}", "", ("dilation=",), kwargs={"dilation": dilation})
        for dilation in (0, -1, (1, 0), (0, 1), (-1, 1))
    ),
    *(
        BadCall(f"padding {padding}", "negative padding is not supported", ("padding=",),
                kwargs={"padding": padding})
        for padding in (-1, (0, -1), (-1, 0))
    ),
    *(
        BadCall(f"{name} of {len(value)} values", f"expected {name} to be a single integer value "
                "or a list of 2 values to match the convolution dimensions",
                (f"{name}={list(value)}",), kwargs={name: value})
        for name in ("stride", "padding", "dilation")
        for value in ((1, 1, 1), ())
    ),
    BadCall("padding name", "Invalid padding string: 'full'", (), kwargs={"padding": "full"}),
    BadCall("padding name in capitals", "Invalid padding string: 'SAME'", (),
            kwargs={"padding": "SAME"}),
    BadCall("same with stride", "padding='same' is not supported for strided convolutions", (),
            kwargs={"padding": "same", "stride": 2}),
    BadCall("kernel too large", "Calculated padded input size per channel: (8 x 9). Kernel size: "
            "(9 x 3). Kernel size can't be greater than actual input size",
            ("[2, 4, 8, 9]", "[6, 4, 9, 3]"), weight=(6, 4, 9, 3)),
    BadCall("dilated kernel too large", "Calculated padded input size per channel: (8 x 9). Kernel "
            "size: (11 x 3). Kernel size can't be greater than actual input size", (),
            kwargs={"dilation": (5, 1)}),
    BadCall("padded input too small", "Calculated padded input size per channel: (10 x 13). Kernel "
            "size: (14 x 3). Kernel size can't be greater than actual input size", (),
            weight=(6, 4, 14, 3), kwargs={"padding": (1, 2)}),
    BadCall("empty image", "Only zero batch or zero channel inputs are supported, but got input "
            "shape: [2, 4, 0, 9]", (), input=(2, 4, 0, 9), kwargs={"padding": 2}),
    *(
        BadCall(f"bias of shape {shape}", f"Given weight of size [6, 4, 3, 3], expected bias to be "
                f"1-dimensional with 6 elements, but got bias of size {list(shape)} instead", (),
                bias=shape)
        for shape in ((5,), (7,), (1,), (), (6, 1), (0,))
    ),
    BadCall("padding that overflows", "", ("padding",), kwargs={"padding": 2**62}),
)  # fmt: skip


def raised(function, *args, **kwargs) -> BaseException:
    # Any exception: F.conv2d says which type is right.
    with pytest.raises(Exception) as info:
        function(*args, **kwargs)
    return info.value


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda call: call.name)
def test_bad_geometry(call, device):
    tensors = [t if t is None else t.to(device) for t in call.tensors()]
    theirs = raised(F.conv2d, *tensors, **call.kwargs)
    ours = raised(conv2d_ext.conv2d, *tensors, **call.kwargs)
    assert type(ours) is type(theirs), (ours, theirs)
    assert call.phrase in str(theirs), "F.conv2d no longer says so"
    for text in (call.phrase, *call.names):
        assert text in str(ours)


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda call: call.name)
def test_bad_geometry_of_meta_tensors(call):
    """Tracing refuses the same calls."""
    tensors = [t if t is None else t.to("meta") for t in call.tensors()]
    eager = raised(conv2d_ext.conv2d, *call.tensors(), **call.kwargs)
    traced = raised(conv2d_ext.conv2d, *tensors, **call.kwargs)
    assert type(traced) is type(eager)
    assert call.phrase in str(traced)


class TestKinds:
    """dtype, device and layout."""

    @staticmethod
    def _same_type(*args, **kwargs) -> str:
        theirs = raised(F.conv2d, *args, **kwargs)
        ours = raised(conv2d_ext.conv2d, *args, **kwargs)
        assert type(ours) is type(theirs), (ours, theirs)
        return str(ours)

    def test_mixed_input_and_weight(self):
        message = self._same_type(torch.randn(X), torch.randn(W).double())
        assert re.search(r"Input type .*weight type .*should be the same", message)

    def test_mixed_input_and_bias(self):
        message = self._same_type(torch.randn(X), torch.randn(W), torch.randn(B).double())
        assert re.search(r"Input type .*bias type .*should be the same", message)

    def test_complex_bias(self):
        message = self._same_type(torch.randn(X), torch.randn(W), torch.randn(B) + 0j)
        assert "should be the same" in message

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint16, torch.uint32, torch.float8_e4m3fn], ids=str
    )
    def test_dtypes_that_do_not_convolve(self, dtype):
        message = self._same_type(torch.ones(X).to(dtype), torch.ones(W).to(dtype))
        assert "not implemented for" in message

    @pytest.mark.needs_cuda
    def test_two_devices(self):
        for which in range(3):
            tensors = [torch.randn(shape) for shape in (X, W, B)]
            tensors[which] = tensors[which].cuda()
            self._same_type(*tensors)

    def test_meta_among_real_tensors(self):
        """F.conv2d reads the missing data's memory as if it were there; here it is refused."""
        for which in range(3):
            tensors = [torch.randn(shape) for shape in (X, W, B)]
            tensors[which] = tensors[which].to("meta")
            message = str(raised(conv2d_ext.conv2d, *tensors))
            assert "same device" in message
            assert "meta" in message

    def test_sparse_input(self):
        """Refused by the dispatcher, with a subclass of what F.conv2d raises."""
        theirs = raised(F.conv2d, torch.randn(X).to_sparse(), torch.randn(W))
        ours = raised(conv2d_ext.conv2d, torch.randn(X).to_sparse(), torch.randn(W))
        assert isinstance(ours, type(theirs))
        assert "Sparse" in str(ours)

    def test_quantized_input(self):
        quantized = torch.quantize_per_tensor(torch.randn(X), 1.0, 0, torch.qint8)
        with pytest.raises(RuntimeError, match="expected input not to be quantized, but got Q"):
            conv2d_ext.conv2d(quantized, torch.randn(W))

    @pytest.mark.parametrize("which", range(3), ids=["input", "weight", "bias"])
    @pytest.mark.parametrize("dims", [1, 2])
    def test_mkldnn_layout(self, which, dims):
        """Which F.conv2d takes, of the input."""
        shapes = (X, W, B) if dims == 2 else (X[:-1], W[:-1], B)
        tensors = [torch.randn(shape) for shape in shapes]
        tensors[which] = tensors[which].to_mkldnn()
        error = raised(conv2d_ext.conv2d if dims == 2 else conv2d_ext.conv1d, *tensors)
        assert type(error) is RuntimeError
        assert f"expected {('input', 'weight', 'bias')[which]} to be a dense" in str(error)
        assert "Mkldnn" in str(error)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((None, torch.ones(W)), {}),
            (([1.0], torch.ones(W)), {}),
            ((torch.ones(X), "weight"), {}),
            ((torch.ones(X), torch.ones(W), "bias"), {}),
            ((torch.ones(X),), {}),
            ((), {}),
            ((torch.ones(X), torch.ones(W)), {"stride": 1.5}),
            ((torch.ones(X), torch.ones(W)), {"stride": None}),
            *(
                ((torch.ones(X), torch.ones(W)), {name: value})
                for name, value in BOOLS
            ),
            ((torch.ones(X), torch.ones(W)), {"padding": 0.5}),
            ((torch.ones(X), torch.ones(W)), {"dilation": "1"}),
            ((torch.ones(X), torch.ones(W)), {"groups": 1.0}),
            ((torch.ones(X), torch.ones(W)), {"unknown": 1}),
            ((torch.ones(X), torch.ones(W), None, 1, 0, 1, 1, 1), {}),
        ],
        ids=[
            "no input", "list input", "text weight", "text bias", "no weight", "nothing",
            "fractional stride", "no stride", *(f"{n}={v}" for n, v in BOOLS),
            "fractional padding", "text dilation",
            "fractional groups", "unknown keyword", "too many",
        ],
    )  # fmt: skip
    def test_types_of_arguments(self, args, kwargs):
        self._same_type(*args, **kwargs)
        explained = raised(conv2d_ext.explain, *args, **kwargs)
        assert isinstance(explained, TypeError)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((torch.ones(X), torch.ones(W)), {"stride": (torch.tensor(True), 1)}),
            ((torch.ones(X), torch.ones(W)), {"groups": torch.tensor(True)}),
            ((torch.ones(X), torch.ones(W)), {"stride": 2**63}),
            ((torch.ones(X), torch.ones(3, 4)), {"stride": 2, "padding": "same"}),
            ((torch.ones(X), torch.nn.UninitializedParameter()), {}),
            ((torch.nested.nested_tensor([torch.ones(X[1:])]), torch.ones(W)), {}),
        ],
        ids=["bool tensor", "bool groups", "overflow", "2-D weight", "uninitialized", "nested"],
    )
    @pytest.mark.filterwarnings("ignore:.*nested tensors")
    def test_explain_refuses_what_conv2d_does(self, args, kwargs):
        self._same_type(*args, **kwargs)
        ours = raised(conv2d_ext.conv2d, *args, **kwargs)
        assert type(raised(conv2d_ext.explain, *args, **kwargs)) is type(ours)


class TestOverflow:
    """Sizes whose product leaves 64 bits are refused by name; nothing is allocated for them."""

    @staticmethod
    def _message(*args, **kwargs) -> str:
        error = raised(conv2d_ext.conv2d, *args, **kwargs)
        assert type(error) is RuntimeError
        return str(error)

    def test_output(self):
        """The bytes of this output leave 64 bits."""
        input, weight = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
        message = self._message(input, weight, padding=2**31)
        assert "overflow" in message
        assert "output" in message
        theirs = raised(F.conv2d, input, weight, padding=2**31)
        assert isinstance(theirs, RuntimeError)

    def test_padded_input(self):
        message = self._message(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), padding=2**62)
        assert "padding" in message

    def test_dilated_kernel(self):
        message = self._message(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), dilation=2**62)
        assert "dilation" in message

    def test_output_of_expanded_tensors(self):
        input = torch.ones(1).expand(2**31, 1, 2**16, 2**14)
        weight = torch.ones(1).expand(2**10, 1, 1, 1)
        assert "overflow" in self._message(input, weight)

    def test_more_memory_than_there_is(self):
        """An output that fits 64 bits but no memory fails as F.conv2d's does."""
        input, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
        theirs = raised(F.conv2d, input, weight, padding=2**22)
        ours = raised(conv2d_ext.conv2d, input, weight, padding=2**22)
        assert type(ours) is type(theirs)


NOT_THERE = "The tensor has a non-zero number of elements, but its data is not allocated yet."


class TestStorage:
    """Elements that lie in no memory, as sharding leaves them between forward and backward."""

    @staticmethod
    def _tensors(device, requires_grad=()):
        shapes = {"input": X, "weight": W, "bias": B}
        tensors = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
        for name in requires_grad:
            tensors[name].requires_grad_()
        return tensors

    @pytest.mark.parametrize("name", ["input", "weight", "bias"])
    @pytest.mark.parametrize("offset", [0, 8])
    def test_freed(self, name, offset, device):
        """F.conv2d says so of input and weight, and crashes on a bias."""
        tensors = self._tensors(device)
        whole = torch.randn(offset + tensors[name].numel(), device=device)
        tensors[name] = whole[offset:].view(tensors[name].shape)
        whole.untyped_storage().resize_(0)
        if name != "bias" and device == "cpu":
            assert NOT_THERE in str(raised(F.conv2d, **tensors))
        error = raised(conv2d_ext.conv2d, **tensors)
        assert type(error) is RuntimeError
        assert NOT_THERE in str(error)
        assert name in str(error)
        assert conv2d_ext.explain(**tensors).output_size == (2, 6, 6, 7)  # reads nothing

    @pytest.mark.parametrize(
        ("freed", "wanted"),
        [
            ("weight", "input"),
            ("input", "weight"),
            ("grad_output", "input"),
            ("grad_output", "weight"),
            ("grad_output", "bias"),
        ],
    )
    def test_freed_before_backward(self, freed, wanted, device):
        tensors = self._tensors(device, requires_grad=[wanted])
        output = conv2d_ext.conv2d(**tensors)
        tensors["grad_output"] = torch.randn_like(output)
        tensors[freed].untyped_storage().resize_(0)
        error = raised(output.backward, tensors["grad_output"])
        assert type(error) is RuntimeError
        assert NOT_THERE in str(error)
        assert freed in str(error)

    def test_freed_and_filled_again(self, device):
        """What sharded training does: the full weight is there whenever it is read."""
        tensors = self._tensors(device, requires_grad=["input"])
        kept = tensors["weight"].clone()
        storage = tensors["weight"].untyped_storage()
        bytes_ = storage.nbytes()
        output = conv2d_ext.conv2d(**tensors)
        storage.resize_(0)
        storage.resize_(bytes_)
        tensors["weight"].data.copy_(kept)
        output.sum().backward()
        expected = torch.nn.grad.conv2d_input(X, kept, torch.ones_like(output))
        torch.testing.assert_close(tensors["input"].grad, expected)

    @pytest.mark.parametrize("name", ["input", "weight", "bias"])
    def test_made_smaller(self, name, device):
        """F.conv2d reads on, past the end of the memory."""
        tensors = self._tensors(device)
        bytes_ = tensors[name].numel() * 4
        tensors[name].untyped_storage().resize_(bytes_)
        conv2d_ext.conv2d(**tensors)
        tensors[name].untyped_storage().resize_(bytes_ - 1)
        error = raised(conv2d_ext.conv2d, **tensors)
        assert type(error) is RuntimeError
        assert f"out of bounds for storage of size {bytes_ - 1}" in str(error)
        assert name in str(error)

    def test_no_elements_need_no_storage(self, device):
        weight, bias = torch.randn(W, device=device), torch.randn(B, device=device)
        empty = torch.randn(X, device=device)[:0].detach().clone()
        empty.untyped_storage().resize_(0)
        assert conv2d_ext.conv2d(empty, weight, bias).shape == (0, 6, 6, 7)
        no_channels = torch.randn(2, 0, 8, 9, device=device)
        no_channels.untyped_storage().resize_(0)
        assert conv2d_ext.conv2d(no_channels, weight[:, :0], bias).shape == (2, 0, 6, 7)

    @pytest.mark.parametrize("size", [(0, 4, 8, 9), (2, 0, 8, 9)])
    def test_empty_images_read_no_weight(self, size, device):
        """A shard without images has its results while the weight is elsewhere."""
        input = torch.randn(size, device=device, requires_grad=True)
        weight = torch.randn(6, size[1], 3, 3, device=device, requires_grad=True)
        bias = torch.randn(B, device=device, requires_grad=True)
        for tensor in (weight, bias):
            tensor.untyped_storage().resize_(0)
        output = conv2d_ext.conv2d(input, weight, bias)
        assert output.shape == (size[0], 6 if size[1] else 0, 6, 7)
        gradients = torch.autograd.grad(output.sum(), (input, weight, bias))
        for gradient, tensor in zip(gradients, (input, weight, bias), strict=True):
            assert gradient.shape == tensor.shape
            assert not gradient.count_nonzero()

    def test_expanded_and_sliced_tensors_lie_within_theirs(self, device):
        input = torch.randn(4, 8, 9, device=device).expand(X)
        weight = torch.randn(6, 4, 5, 5, device=device)[:, :, 2:, 2:]
        bias = torch.randn(1, device=device).expand(B)
        torch.testing.assert_close(
            conv2d_ext.conv2d(input, weight, bias), F.conv2d(input, weight, bias)
        )

    def test_every_op(self, device):
        tensors = self._tensors(device)
        tensors["grad_output"] = torch.randn(2, 6, 6, 7, device=device)
        args = ([1, 1], [0] * 4, [1, 1], 1)
        ops = torch.ops.conv2d_ext
        calls = {
            ("input", "weight", "bias"): lambda x, w, b: ops.conv2d(x, w, b, *args),
            ("grad_output", "weight"): lambda g, w: ops.conv2d_grad_input(g, w, X, *args, False),
            ("grad_output", "input"): lambda g, x: ops.conv2d_grad_weight(
                g, x, W, tensors["weight"].stride(), *args
            ),
            ("grad_output",): ops.conv2d_grad_bias,
        }
        for names, call in calls.items():
            for freed in names:
                operands = [tensors[name].clone() for name in names]
                operands[names.index(freed)].untyped_storage().resize_(0)
                message = str(raised(call, *operands))
                assert NOT_THERE in message
                assert freed in message


class TestOps:
    """The dispatcher ops check what the public functions cannot get wrong."""

    def test_lengths_of_lists(self):
        x, w = torch.randn(X), torch.randn(W)
        op = torch.ops.conv2d_ext.conv2d
        for args in (
            ([1], [0] * 4, [1, 1]),
            ([1, 1], [0] * 2, [1, 1]),
            ([1, 1], [0] * 4, [1] * 3),
        ):
            assert "list of" in str(raised(op, x, w, None, *args, 1))

    def test_grad_output_of_another_shape(self):
        args = ([1, 1], [0] * 4, [1, 1], 1)
        wrong = torch.randn(2, 6, 6, 6)
        for error in (
            raised(torch.ops.conv2d_ext.conv2d_grad_input, wrong, torch.randn(W), X, *args, False),
            raised(
                torch.ops.conv2d_ext.conv2d_grad_weight,
                wrong, torch.randn(X), W, [36, 9, 3, 1], *args,
            ),
        ):  # fmt: skip
            assert type(error) is RuntimeError
            assert "grad_output" in str(error)
            assert "[2, 6, 6, 6]" in str(error)
            assert "[2, 6, 6, 7]" in str(error)

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 3, 4, 5)], ids=str)
    def test_grad_bias_rank(self, shape):
        error = raised(torch.ops.conv2d_ext.conv2d_grad_bias, torch.randn(shape))
        assert "grad_output" in str(error)
