"""Rewards: plain functions from pictures to one number >= 0 each; how they are found and checked.

The OCR reward of the paper's experiments, and the one signature of every reward, built in or yours:
    f(images (B,3,H,W) float in [0,1], prompts B str, metadata B dict) -> (B,) float >= 0
    ocr = 1 - min(edit distance(target, read), n) / n,  n = len(target);  1 if target is inside read
target: quoted text of the prompt; read: what the OCR engine saw, lines joined; m rewards, B images.
Differences from the peers' OCR reward (the paper prints none):
1. RapidOCR with the PP-OCRv6 small models of its wheel, not PaddleOCR; no network, one thread.
2. All quoted parts count, not the first; typographic and single quotes count too.
3. Text is compared after NFKC and casefold (peers: lower case); both drop whitespace.
4. A picture the engine fails on gets NaN, not 0; failing on all of them stops the run.
5. PP-OCRv6 reads a drawn square as a symbol: symbols the target lacks are dropped (peers: English).
Call: score(load_rewards(["ocr", "my_file.py:my_reward"], device), images, prompts, metadata)
"""

import functools
import importlib.util
import re
import sys
import unicodedata
import warnings
from pathlib import Path

import torch

DOUBLE = re.compile(r'"([^"]*)"|[“„”]([^“”]*)[“”]|«([^»]*)»|「([^」]*)」')
# An apostrophe has a letter before it where a quote opens, or after it where a quote closes.
SINGLE = re.compile(r"(?<!\w)'(.*?)'(?!\w)|(?<!\w)[‘‚](.*?)[’‘](?!\w)", re.DOTALL)
PLAIN = str.maketrans("‘’ʼ“”„–—−", "'''\"\"\"---")  # where a typist and an OCR engine differ


def quoted_text(prompt):
    """The text a prompt wants drawn: its quoted parts, joined by a space.

    "A", “A”, „A“, «A», 「A」 count; 'A' and ‘A’ only without any of those, because of rock 'n'
    roll. ValueError: no quotes, empty or unpaired ones.
    """
    parts = ["".join(groups) for groups in DOUBLE.findall(prompt) or SINGLE.findall(prompt)]
    unpaired = re.search('["“”„«»「」]', DOUBLE.sub("", prompt))
    if unpaired or not parts or not all(map(normalise, parts)):
        fault = "unpaired quote" if unpaired else "empty quotes" if parts else "no quoted text"
        raise ValueError(f'{fault} in prompt {prompt!r}: write the text to draw as "TEXT"')
    return " ".join(part.strip() for part in parts)


def normalise(text):
    """Text as it is compared: NFKC, casefold, no whitespace, no invisible format characters."""
    text = unicodedata.normalize("NFKC", text).translate(PLAIN).casefold()
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) != "Cf")


def edit_distance(a, b):
    """Fewest insertions, deletions and substitutions that turn string a into string b."""
    row = list(range(len(b) + 1))  # row[j]: distance from the part of a read so far to b[:j]
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def text_score(read, target):
    """Peers' OCR rule in [0,1], after `normalise`; other writing in the picture is not punished."""
    read, target = normalise(read), normalise(target)
    if not target:
        raise ValueError("text_score: the target text is empty")
    distance = 0 if target in read else edit_distance(read, target)
    return 1.0 - min(distance, len(target)) / len(target)


@functools.lru_cache(maxsize=1)
def ocr_engine():
    """RapidOCR 3.10 on the CPU, built once per process."""
    import rapidocr

    models = Path(rapidocr.__file__).parent / "models"  # a path that is given is never downloaded
    # 100 three-letter words in 64 x 64: all found at side 128; canvas 160 (long lines widen it)
    # instead of 320 takes 48 to 27 ms an image. Enlarging first or lower thresholds: no gain.
    return rapidocr.RapidOCR(params={
        "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
        "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
        "Det.limit_side_len": 128,  # px, shorter side at least; larger pictures keep their size
        "Rec.rec_img_shape": [3, 48, 160],
        "Global.use_cls": False,  # no text upside down
        "Global.log_level": "error",  # no warning for each picture without text
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
    })


def ocr(images, prompts, metadata):
    """How well each prompt's quoted text can be read off its picture: (B,) float32 in [0,1].

    Checkpoint PP-OCRv6 small, rapidocr 3.10, CPU; metadata unused. ValueError: a prompt without
    quoted text. A picture the engine fails on: NaN and a warning; all of them: RuntimeError.
    """
    import cv2
    from rapidocr import LoadImageError
    from rapidocr.inference_engine.onnxruntime import ONNXRuntimeError

    targets = [quoted_text(prompt) for prompt in prompts]
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().byte()
    pixels = pixels.flip(1).permute(0, 2, 3, 1).contiguous().numpy()  # (B,H,W,3) BGR
    result, failures = torch.full((len(images),), torch.nan), []
    for i, (picture, target) in enumerate(zip(pixels, targets, strict=True)):
        try:  # only what one picture can cause: a changed API (AttributeError, ...) stops the run
            lines = ocr_engine()(picture).txts or ()
        except (cv2.error, LoadImageError, ONNXRuntimeError) as error:
            failures.append(error)
            continue
        read = "".join(c for c in " ".join(lines) if unicodedata.category(c) != "So" or c in target)
        result[i] = text_score(read, target)
    if failures:
        note = f"reward ocr: the engine failed on {len(failures)} of {len(images)} images"
        if len(failures) == len(images):
            raise RuntimeError(note) from failures[0]
        warnings.warn(f"{note}, which get NaN: {failures[0]!r:.200}", stacklevel=2)
    return result.to(images.device)


BUILT_IN = {"ocr": ocr}
# Columns of the real models: toy.py:ocr is named toy.ocr, toy.py:detail is named detail.
REAL = {*BUILT_IN, "clipscore", "hpsv2", "pickscore", "geneval", "aesthetic"}


@functools.cache
def load_file(path):
    """The module of an absolute path, executed once per process, also if imported elsewhere."""
    name, loaded = path.stem, sys.modules.get(path.stem)
    if Path(getattr(loaded, "__file__", None) or "").resolve() == path:
        return loaded
    if loaded or name in sys.stdlib_module_names:  # two files of one name, or your queue.py
        name = str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a half-executed file must not pass for the whole one
        raise
    return module


def load_function(spec):
    """The function of "file.py:function", else ValueError; a relative file is looked for in the
    working directory, then beside rewards.py."""
    file, _, name = spec.rpartition(":")
    paths = [(base / file).resolve() for base in (Path.cwd(), Path(__file__).parent)]
    path = next((p for p in paths if p.suffix == ".py" and p.is_file()), None)
    if path is None:
        places = " or ".join(dict.fromkeys(map(str, paths)))
        raise ValueError(f"{spec!r}: no such file; must be file.py:function ({places})")
    module = load_file(path)
    if not callable(f := getattr(module, name, None)):
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", 0) == module.__name__]
        raise ValueError(f"{spec!r}: no function {name!r}, {path.name} has {', '.join(own)}")
    return f


def load_rewards(names, device):
    """{name: f} for built-in names ("ocr") and "file.py:function".

    The name in results is the function's, with its file's in front where a real model has it.
    device: for rewards with weights (ocr runs on the CPU). ValueError: not found, or a name twice.
    """
    rewards = {}
    for spec in names:
        file, _, name = spec.rpartition(":")
        if not file and name not in BUILT_IN:
            raise ValueError(f"no reward {spec!r}: give {', '.join(BUILT_IN)} or file.py:function")
        key = f"{Path(file).stem}.{name}" if file and name in REAL else name
        if key in rewards:
            raise ValueError(f"reward {spec!r}: the name {key} is taken, rename one function")
        rewards[key] = load_function(spec) if file else BUILT_IN[name]
    return rewards


@torch.no_grad()
def score(rewards, images, prompts, metadata):
    """All rewards on one batch: (m,B) float64 on the CPU, rows in the order of `rewards`.

    A NaN among numbers stays. ValueError: an image that is not finite or leaves [0,1], unequal
    lengths, a reward with the wrong shape or dtype, nothing finite or a negative number.
    """
    B, n, shape = len(prompts), len(metadata), tuple(images.shape)
    if len(shape) != 4 or shape[:2] != (B, 3) or n != B:
        raise ValueError(f"images {shape}, {B} prompts, {n} metadata: must be (B,3,H,W), B and B")
    good = ((images.float() - 0.5).abs() < 0.501).flatten(1).all(1)  # (B,), False for NaN
    if not good.all():
        raise ValueError(f"image {good.tolist().index(False)}: not finite or outside [0,1]")
    result = torch.empty(len(rewards), B, dtype=torch.float64)
    for row, (name, f) in zip(result, rewards.items(), strict=True):
        value = f(images, prompts, metadata)
        if not torch.is_tensor(value) or value.shape != (B,) or not value.is_floating_point():
            got = (*value.shape, value.dtype) if torch.is_tensor(value) else type(value).__name__
            raise ValueError(f"reward {name} returned {got}, must be a float tensor ({B},)")
        row.copy_(value)
        if B and not row.isfinite().any():
            raise ValueError(f"reward {name}: not finite for any of the {B} images")
        if (row[row.isfinite()] < 0).any():
            raise ValueError(f"reward {name}: {row[row.isfinite()].min():.4g}, must be >= 0")
    return result
