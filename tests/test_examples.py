"""The programs of examples/: what they print, save and claim, and how they refuse bad input."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_image

import conv2d_ext

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess:
    """The finished program, run in `folder` with the conv2d_ext that is under test."""
    package = Path(conv2d_ext.__file__).parent.parent
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,  # a training takes 25 s on two cores that it has for itself
    )


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_digits():
    return load("train_digits")


@pytest.fixture(scope="module")
def filter_photo():
    return load("filter_photo")


def pixels(path: Path) -> numpy.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.mode == "RGB"
        return numpy.asarray(image).astype(numpy.float64)


# ---- train_digits


def test_both_networks_learn_the_same(tmp_path):
    done = run("train_digits", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("holds ") == 3
    for name in ("torch.nn.Conv2d", "conv2d_ext.Conv2d"):
        assert name in done.stdout
    with Image.open(tmp_path / "outputs" / "train_digits.png") as picture:
        assert picture.format == "PNG"
        assert numpy.asarray(picture.convert("L")).std() > 10  # something is drawn


def test_a_training_that_is_too_short_fails(tmp_path):
    done = run("train_digits", "--epochs", 1, "--out", "curves.png", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FAILS both are right on at least 97 %" in done.stdout
    assert "holds the first 20 losses agree" in done.stdout
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_a_wrong_gradient_fails_the_claim_about_losses(train_digits, parameter):
    class Wrong(conv2d_ext.Conv2d):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            # As if taps, or channels, were taken in the wrong order.
            getattr(self, parameter).register_hook(lambda grad: grad.flip(-1))

    torch.set_num_threads(1)
    digits = train_digits.load_digits("cpu")
    layers = {"right": torch.nn.Conv2d, "wrong": Wrong}
    histories = {
        name: train_digits.train(layer, digits, epochs=1, seed=0, after_epoch=lambda: None)
        for name, layer in layers.items()
    }
    (_, (sentence, holds)) = train_digits.claims(histories)[1:]
    assert "losses" in sentence
    assert not holds


def test_a_loss_that_is_no_number_fails_the_claim(train_digits):
    right = train_digits.History([1.0] * 20, [98.0], 1.0)
    wrong = train_digits.History([1.0] * 19 + [float("nan")], [98.0], 1.0)
    assert [holds for _, holds in train_digits.claims({"a": right, "b": right})] == [True] * 3
    assert [holds for _, holds in train_digits.claims({"a": right, "b": wrong})] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "0"], "--epochs: wanted a whole number from 1 on, got '0'"),
        (["--threads", "two"], "--threads: wanted a whole number from 1 on, got 'two'"),
        (["--out", "text/curves.png"], "--out text/curves.png: cannot write there: "),
        (["--out", "folder.png"], "--out folder.png: cannot write there: Is a directory"),
        (["--out", "curves.txt"], "--out curves.txt: the name must end in one of"),
        (["--device", "nonsense"], "--device nonsense: "),
        (["--device", "meta"], "--device meta: "),
    ],
)
def test_train_digits_refuses(train_digits, monkeypatch, tmp_path, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a file, where a folder is wanted")
    Path("folder.png").mkdir()
    with pytest.raises(SystemExit) as exit:
        train_digits.main(arguments)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


# ---- filter_photo


def test_filters_of_the_photograph_against_scipy(tmp_path):
    done = run("filter_photo", "--sigma", 2, "--out-dir", "pictures", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    folder = tmp_path / "pictures"
    photo = load_sample_image("china.jpg")
    assert (pixels(folder / "original.png") == photo).all()

    # Both axes of the picture, not the colours; zeros outside.
    def each_colour(function):
        colours = [function(photo[..., c].astype(numpy.float64)) for c in range(3)]
        return numpy.stack(colours, axis=-1)

    def correlate(rows):
        return each_colour(lambda x: ndimage.correlate(x, numpy.array(rows), mode="constant"))

    def gradient(axis):
        return each_colour(lambda x: ndimage.sobel(x, axis=axis, mode="constant") / 4)

    wanted = {
        "gaussian": each_colour(
            lambda x: ndimage.gaussian_filter(x, 2, mode="constant", truncate=3)
        ),
        "sobel": numpy.hypot(gradient(0), gradient(1)),
        "sharpen": correlate([[0, -1, 0], [-1, 5, -1], [0, -1, 0]]),
        "emboss": correlate([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]),
        "outline": correlate([[-1, -1, -1], [-1, 8, -1], [-1, -1, -1]]),
    }
    assert {path.stem for path in folder.iterdir()} == {"original", *wanted}
    for name, result in wanted.items():
        # Half a grey level is lost to rounding.
        difference = abs(pixels(folder / f"{name}.png") - result.clip(0, 255)).max()
        assert difference < 0.51, name


def test_a_wrong_convolution_fails(filter_photo, monkeypatch, tmp_path):
    right = conv2d_ext.conv2d
    monkeypatch.setattr(conv2d_ext, "conv2d", lambda *a, **options: right(*a, **options) + 1e-3)
    assert filter_photo.main(["--filter", "sharpen", "--out-dir", str(tmp_path)]) == 1


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_any_picture_even_one_smaller_than_the_kernel(filter_photo, tmp_path, mode):
    noise = numpy.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=numpy.uint8)
    path = tmp_path / ("picture.tif" if mode == "CMYK" else "picture.png")
    Image.fromarray(noise).convert(mode).save(path)
    arguments = ["--input", str(path), "--out-dir", str(tmp_path / "out"), "--sigma", "20"]
    assert filter_photo.main(arguments) == 0
    for name in filter_photo.FILTERS:
        assert pixels(tmp_path / "out" / f"{name}.png").shape == (4, 5, 3)


def test_a_photograph_that_says_it_lies_on_its_side_is_turned(filter_photo, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn right to view
    Image.new("RGB", (6, 4)).save(tmp_path / "photo.jpg", exif=exif)
    arguments = ["--input", str(tmp_path / "photo.jpg"), "--out-dir", str(tmp_path)]
    assert filter_photo.main([*arguments, "--filter", "sobel"]) == 0
    assert pixels(tmp_path / "sobel.png").shape == (6, 4, 3)


def test_only_the_filters_that_were_named(filter_photo, tmp_path):
    names = ["--filter", "sobel", "--filter", "emboss", "--filter", "sobel"]
    assert filter_photo.main([*names, "--out-dir", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "original.png",
        "sobel.png",
        "emboss.png",
    }


def test_list_names_every_filter(filter_photo, capsys):
    assert filter_photo.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(filter_photo.FILTERS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "missing.png"], "missing.png: No such file or directory"),
        (["--input", "."], "Is a directory"),
        (["--input", "text.png"], "text.png is not a picture that can be read"),
        (["--input", "cut.png"], "cut.png is not a picture that can be read"),
        (["--filter", "swirl"], "there is no filter 'swirl'; there are gaussian, sobel"),
        (["--sigma", "0"], "--sigma: wanted a number above 0, up to 100, got '0'"),
        (["--sigma", "nan"], "got 'nan'"),
        (["--sigma", "wide"], "got 'wide'"),
        (["--sigma", "1e9"], "got '1e9'"),
        (["--out-dir", "text.png"], "text.png: File exists"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_filter_photo_refuses_in_one_sentence(
    filter_photo, monkeypatch, tmp_path, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    Path("text.png").write_text("this is no picture")
    Image.fromarray(load_sample_image("china.jpg")).save("whole.png")
    Path("cut.png").write_bytes(Path("whole.png").read_bytes()[:5000])
    with pytest.raises(SystemExit) as exit:
        filter_photo.main(arguments)
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_bad_input_ends_the_program_with_status_2(tmp_path):
    done = run("filter_photo", "--input", "missing.png", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "filter_photo.py: missing.png: No such file or directory\n"
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


class TestBatchInvariant:
    def test_shows_that_no_answer_depends_on_its_batch(self, tmp_path):
        done = run("batch_invariant", "--size", 32, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("same bits") >= 10
        assert "OTHER BITS" not in done.stdout
        with Image.open(tmp_path / "outputs" / "batch_invariant.png") as picture:
            assert picture.size[0] > 500

    @pytest.mark.parametrize(
        "arguments", [("--model", "nothing"), ("--size", "3"), ("--output", "missing/x.png")]
    )
    def test_refuses_bad_arguments(self, arguments, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["batch_invariant.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            load("batch_invariant").main()
        assert stopped.value.code == 2
        assert arguments[0] in capsys.readouterr().err
