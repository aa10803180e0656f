"""Rewards: plain functions from pictures to one number >= 0 each; how they are loaded and checked.

The rewards and judges of the paper's experiments, and the one signature of every reward:
    f(images (B,3,H,W) float in [0,1], prompts B str, metadata B dict) -> (B,) float >= 0
    ocr   1 - min(edit distance(target, read), n) / n,  n = len(target);  1 if target is inside read
    clipscore, hpsv2, pickscore   max(0, cos(image, prompt)) of three CLIPs;  aesthetic   LAION v2
    geneval   share of GenEval's facts that are right;  geneval_strict   1 if all of them, else 0
Optional: f.source, a str; f.check(prompt, facts), ValueError where f cannot score. Unlike peers:
1. RapidOCR, not PaddleOCR. All quoted parts count, in any quotes, after NFKC and casefold; it reads
   drawn squares as symbols: those the target lacks are dropped.
2. Cosines as they are: PickScore is 100 cos (its logit scale), peers' pickscore 100 cos / 26.
3. GenEval with the Mask2Former of transformers, not of mmdet; graded by default. No pickles.
"""

import importlib.util
import json
import math
import re
import sys
import unicodedata
import warnings
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.functional import linear, normalize

DOUBLE = re.compile(r'"([^"]*)"|[“„”]([^“”]*)[“”]|«([^»]*)»|「([^」]*)」')
# An apostrophe has a letter before it where a quote opens, or after it where a quote closes.
SINGLE = re.compile(r"(?<!\w)'(.*?)'(?!\w)|(?<!\w)[‘‚](.*?)[’‘](?!\w)", re.DOTALL)
PLAIN = str.maketrans("‘’ʼ“”„–—−", "'''\"\"\"---")  # where a typist and an OCR engine differ
COLOURS = "red orange yellow green blue purple pink brown black white".split()
# COCO's and the detector's names: how GenEval, and its texts for CLIP, spell them
GENEVAL = {"motorbike": "motorcycle", "aeroplane": "airplane", "sofa": "couch", "tvmonitor": "tv",
           "pottedplant": "potted plant", "diningtable": "dining table", "mouse": "computer mouse",
           "remote": "tv remote", "keyboard": "computer keyboard"}


def quoted_text(prompt):
    """The text to draw: the quoted parts, joined by a space: "A", “A”, „A“, «A», 「A」, or 'A', ‘A’
    without any of those (rock 'n' roll). ValueError: no quotes, empty or unpaired ones."""
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


def text_score(read, target):
    """Peers' OCR rule, above, after `normalise`; other writing in the picture is not punished."""
    from rapidfuzz.distance import Levenshtein
    read, target = normalise(read), normalise(target)
    distance = 0 if target in read else Levenshtein.distance(target, read)
    return 1.0 - min(distance, len(target)) / len(target)


def pixels(images):
    """(B,3,H,W) in [0,1] -> (B,H,W,3) bytes, a numpy array."""
    return (images.float().cpu().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


@cache
def ocr_engine():
    """RapidOCR 3.10 on the CPU, built once. 100 three-letter words in 64 x 64: all found at side
    128; canvas 160 (long lines widen it) instead of 320 takes 48 to 27 ms an image."""
    import rapidocr
    model = str(Path(rapidocr.__file__).parent / "models" / "PP-OCRv6_{}_small.onnx")  # no download
    return rapidocr.RapidOCR(params={
        "Det.model_path": model.format("det"), "Det.limit_side_len": 128,  # px, shorter side >=
        "Rec.model_path": model.format("rec"), "Rec.rec_img_shape": [3, 48, 160],
        "Global.use_cls": False, "Global.log_level": "error",  # no text upside down, no chatter
        "EngineConfig.onnxruntime.intra_op_num_threads": 1})


def ocr(images, prompts, metadata):
    """How well the prompt's quoted text can be read (PP-OCRv6 small, CPU): (B,) float32 in [0,1].
    A picture the engine fails on gets NaN (peers: 0) and a warning."""
    import cv2
    from rapidocr import LoadImageError
    from rapidocr.inference_engine.onnxruntime import ONNXRuntimeError
    result = torch.full((len(images),), torch.nan)
    for i, (picture, prompt) in enumerate(zip(pixels(images.flip(1)), prompts)):  # blue, green, red
        target = quoted_text(prompt)
        try:  # only what one picture can cause: a changed API (AttributeError, ...) stops the run
            read = " ".join(ocr_engine()(picture).txts or ())
        except (cv2.error, LoadImageError, ONNXRuntimeError) as error:
            warnings.warn(f"reward ocr failed on image {i}: {error!r:.200}", stacklevel=2)
            continue
        read = "".join(c for c in read if unicodedata.category(c) != "So" or c in target)
        result[i] = text_score(read, target)
    return result.to(images.device)


def clip_features(clip, images, texts):
    """CLIP features of length 1: (n,dim) of images (n,3,H,W), (k,dim) of k texts of any length."""
    model, processor = clip
    inputs = processor(text=[*texts], images=[*pixels(images)], return_tensors="pt", padding=True,
                       truncation=True, max_length=77, input_data_format="channels_last")
    output = model(**inputs.to(model.device))
    return output.image_embeds, output.text_embeds


def clip_score(clip, images, prompts, metadata):
    """Cosine of each image and its prompt, clamped at 0: (B,) float32 in [0,1]; CLIPs: BUILT_IN."""
    image, text = clip_features(clip, images, prompts)
    return (image * text).sum(1).clamp(0, 1)


def aesthetic(clip, head, images, prompts, metadata):
    """LAION v2 (sac+logos+ava1-l14-linearMSE): (B,) float32, about 0 to 10, clamped at 0."""
    x, _ = clip_features(clip, images, [""])
    for weight, bias in head:  # linear layers with nothing between them
        x = linear(x, weight, bias)
    return x.squeeze(1).clamp(min=0)


def detect(detector, image):
    """Objects {class, score over 0.3, box [x0,y0,x1,y1] px, mask (H,W)} of an image (3,H,W)."""
    (model, processor), objects = detector, []
    inputs = processor(images=list(pixels(image[None])), return_tensors="pt").to(model.device)
    with torch.device(model.device):  # where it makes its map, which the masks index
        found, = processor.post_process_instance_segmentation(
            model(**inputs), 0.3, target_sizes=[image.shape[1:]], return_binary_maps=True)
    for mask, thing in zip(found["segmentation"].to(image.device).bool(), found["segments_info"]):
        y, x = mask.nonzero(as_tuple=True)
        box = [v.item() for v in (x.min(), y.min(), x.max() + 1, y.max() + 1)]
        name = model.labels[thing["label_id"]]
        objects.append({"class": name, "score": thing["score"], "box": box, "mask": mask})
    return objects


def colour_of(clip, image, thing, name):
    """The one of COLOURS that CLIP sees, zero-shot, in an object cut out onto grey (#999)."""
    x0, y0, x1, y1 = thing["box"]
    cut = torch.where(thing["mask"], image, 0.6)[None, :, y0:y1, x0:x1]
    texts = [text for c in COLOURS for text in (
        f"a photo of a {c} {name}", f"a photo of a {c}-colored {name}", f"a photo of a {c} object")]
    image, text = clip_features(clip, cut, texts)  # (1,dim), (30,dim)
    axes = normalize(text.unflatten(0, (len(COLOURS), -1)).mean(1), dim=1)  # (10,dim)
    return COLOURS[(axes @ image[0]).argmax()]


def relations(a, b):
    """Where box a is as seen from box b, {relation: bool}: the offset of the centres, less a dead
    zone of 0.1 (size a + size b), counts in a direction from half of the offset's length on."""
    offset = [(a[d] + a[d + 2] - b[d] - b[d + 2]) / 2 for d in (0, 1)]
    dead = [0.1 * (a[d + 2] - a[d] + b[d + 2] - b[d]) for d in (0, 1)]
    x, y = (math.copysign(max(abs(o) - z, 0), o) for o, z in zip(offset, dead))
    half = math.hypot(*offset) / 2
    return {"left of": x < -half, "right of": x > half, "above": y < -half, "below": y > half}


def facts_right(things, wanted, colour):
    """GenEval's facts of one picture, a bool each: an include (count objects at least), its color,
    its position (of the count best); an exclude (fewer, yet enough for the includes, or a blank
    picture earned it). Scores over 0.3, for the tag counting 0.9; at most 16 objects of a class."""
    floor = 0.9 if wanted.get("tag") == "counting" else 0.3
    things = sorted((x for x in things if x["score"] > floor), key=lambda x: -x["score"])
    include, least, groups, right = wanted["include"], {}, [], []
    for k, clause in enumerate(include + wanted.get("exclude", [])):
        name, n = GENEVAL.get(clause["class"], clause["class"]), clause["count"]
        objects = [x for x in things if x["class"] == name][:16]
        if k >= len(include):
            right.append(least.get(name, 0) <= len(objects) < n)
            continue
        groups.append(best := objects[:n] if len(objects) >= n else [])
        least[name] = max(n, least.get(name, 0))
        right.append(bool(best))
        if clause.get("color"):
            right.append(bool(best) and all(colour(x, name) == clause["color"] for x in best))
        if clause.get("position"):
            where, other = clause["position"]
            pairs = [relations(a["box"], b["box"])[where] for a in best for b in groups[other]]
            right.append(bool(pairs) and all(pairs))
    return right


def check_facts(labels, prompt, wanted):
    """ValueError: metadata that is not GenEval's, or asks for what the detector cannot see."""
    try:
        good, places = bool(wanted["include"]), [None]
        for k, clause in enumerate(wanted["include"] + wanted.get("exclude", [])):
            good &= GENEVAL.get(clause["class"], clause["class"]) in labels
            good &= type(clause["count"]) is int and clause["count"] > 0
            good &= clause.get("color") in [None, *COLOURS] and clause.get("position") in places
            places += [[where, k] for where in ("left of", "right of", "above", "below")]
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ValueError(f"geneval: {wanted!s:.200}: expected GenEval's metadata, see the README")


def geneval(detector, clip, images, prompts, metadata, strict=False):
    """Share of its facts that each picture gets right, or with strict 1 if all, else 0: (B,).
    Mask2Former Swin-S (COCO instances) finds objects, CLIP ViT-L/14 names their colours."""
    result = torch.zeros(len(images))
    for i, (image, prompt, wanted) in enumerate(zip(images, prompts, metadata)):
        check_facts(detector[0].labels, prompt, wanted)
        right = facts_right(detect(detector, image), wanted, partial(colour_of, clip, image))
        result[i] = all(right) if strict else sum(right) / len(right)
    return result


ocr.source = "PP-OCRv6 small, rapidocr 3.10"
ocr.check = lambda prompt, facts: quoted_text(prompt)
CLIP = "openai/clip-vit-large-patch14"
FINDER = {"DETECTOR": "facebook/mask2former-swin-small-coco-instance", "CLIP": CLIP}
BUILT_IN = {  # name: function, {its first arguments: their checkpoints on the model hub}
    "ocr": (ocr, {}), "clipscore": (clip_score, {"CLIP": CLIP}),
    "hpsv2": (clip_score, {"CLIP": "hpsv2.1"}),  # a folder, made from open_clip's file: README
    "pickscore": (clip_score, {"CLIP": "yuvalkirstain/PickScore_v1"}),
    "geneval": (geneval, FINDER), "geneval_strict": (partial(geneval, strict=True), FINDER),
    "aesthetic": (aesthetic, {"CLIP": CLIP, "HEAD": "ttj/sac-logos-ava1-l14-linearMSE"})}


@cache
def load_part(part, where, offline, device):
    """A frozen float32 CLIP or DETECTOR (model, processor), or a HEAD [[weight, bias], ...]."""
    import transformers
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file
    if part == "HEAD":
        head = load_file(where if Path(where).is_file() else hf_hub_download(
            where, "model.safetensors", local_files_only=offline), device)
        return [[head[f"layers.{k}.{x}"].float() for x in ("weight", "bias")]
                for k in sorted({int(name.split(".")[1]) for name in head})]
    kind = "CLIPModel" if part == "CLIP" else "Mask2FormerForUniversalSegmentation"
    model, info = getattr(transformers, kind).from_pretrained(where, local_files_only=offline,
        use_safetensors=True, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:  # which would be random numbers
        raise ValueError(f"{len(info['missing_keys'])} weights are missing")
    model.requires_grad_(False).eval().to(device)
    if part == "DETECTOR":
        model.labels = [GENEVAL.get(x, x) for _, x in sorted(model.config.id2label.items())]
        return model, transformers.Mask2FormerImageProcessor()  # 800 px and ImageNet's mean and std
    tokenizer = transformers.CLIPTokenizer.from_pretrained(where, local_files_only=offline)
    if len(tokenizer) != model.config.text_config.vocab_size:  # without its files it is empty
        raise ValueError("no tokenizer that fits the model")
    side = model.config.vision_config.image_size
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side)
    return model, transformers.CLIPProcessor(image_processor=pictures, tokenizer=tokenizer)


def load_function(spec):
    """The function of "file.py:function", the file in the working directory or beside this one;
    it is executed once, also if it was imported before. ValueError: not there."""
    file, _, name = spec.rpartition(":")
    paths = (str((base / file).resolve()) for base in (Path.cwd(), Path(__file__).parent))
    path = next((p for p in paths if p.endswith(".py") and Path(p).is_file()), None)
    if path is None:
        raise ValueError(f"{spec!r}: no such file; give {', '.join(BUILT_IN)} or file.py:function")
    module = next((x for x in [*sys.modules.values()] if getattr(x, "__file__", 0) == path), None)
    if module is None:
        found = importlib.util.spec_from_file_location(path, path)
        sys.modules[path] = module = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[path]  # a half-executed file must not pass for the whole one
            raise
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{spec!r}: no function {name!r} in {path}")
    return getattr(module, name)


def load_built_in(name, where, device):
    """A built-in reward from checkpoints, PATH:OWNER/NAME:..., empty: the default, in the cache."""
    function, defaults = BUILT_IN[name]
    places = where.split(":") if where else []
    places += [""] * (len(defaults) - len(places))
    sources = "; ".join(p or d for p, d in zip(places, defaults.values()))
    try:
        parts = [load_part(part, str(Path(place or default)), not place, device)
                 for place, (part, default) in zip(places, defaults.items(), strict=True)]
    except Exception as error:  # of the hub, transformers and safetensors: many kinds
        raise ValueError(f"reward {name}: no {sources or where} (give {name}={':'.join(defaults)}, "
                         f"folders or OWNER/NAME to download): {error}") from error
    if not parts:
        return function
    f = partial(function, *parts)
    f.source = f"{name}: {sources}"
    if "DETECTOR" in defaults:
        f.check = partial(check_facts, parts[0][0].labels)
    return f


def load_rewards(names, device):
    """{name: f} of NAME or NAME=WHERE (built in) and file.py:function, in a comma string or a list;
    toy.py:ocr is called toy.ocr, as ocr is built in. ValueError: not found, a name twice."""
    rewards = {}
    for spec in filter(None, names.split(",")) if isinstance(names, str) else names:
        key, _, where = spec.partition("=")
        if key in BUILT_IN:
            f = load_built_in(key, where, str(device))
        else:
            f, (file, _, name) = load_function(spec), spec.rpartition(":")
            key = f"{Path(file).stem}.{name}" if name in BUILT_IN else name
        if key in rewards:
            raise ValueError(f"reward {spec!r}: the name {key} is taken, give another function")
        rewards[key] = f
    return rewards


def load_prompts(path, rewards=()):
    """Prompts and metadata of a .txt list (a prompt a line) or .jsonl (an object with "prompt").
    ValueError with file and line: no prompt, or one that the check of a reward refuses."""
    text, metadata = Path(path).read_text(encoding="utf-8-sig", errors="replace"), []
    for n, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            facts = json.loads(line) if Path(path).suffix == ".jsonl" else {"prompt": line.strip()}
            if not 0 < len(facts["prompt"].strip()) <= 2000 or "\ufffd" in line:
                raise ValueError("expected 1 to 2,000 characters in UTF-8")
            for f in rewards:
                getattr(f, "check", lambda *line: None)(facts["prompt"], facts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{n}: {error} (a line holds one prompt; in .jsonl it is an "
                             'object with "prompt")') from None
        metadata.append(facts)
    return [facts["prompt"] for facts in metadata], metadata


@torch.no_grad()
def score(rewards, images, prompts, metadata):
    """All rewards on one batch: (m,B) float64 on the CPU; NaN and inf stay. ValueError: an image
    not in [0,1], a reward of wrong shape or dtype or negative, unequal lengths."""
    B, n, shape = len(prompts), len(metadata), tuple(images.shape)
    if len(shape) != 4 or shape[:2] != (B, 3) or n != B:
        raise ValueError(f"images {shape}, {B} prompts, {n} metadata: must be (B,3,H,W), B and B")
    good = ((images.float() - 0.5).abs() < 0.501).flatten(1).all(1)  # (B,), False for NaN
    if not good.all():
        raise ValueError(f"image {good.tolist().index(False)}: not finite or outside [0,1]")
    result = torch.empty(len(rewards), B, dtype=torch.float64)
    for row, (name, f) in zip(result, rewards.items() if B else ()):  # models refuse empty batches
        value = f(images, prompts, metadata)
        if not torch.is_tensor(value) or value.shape != (B,) or not value.is_floating_point():
            raise ValueError(f"reward {name} must return a float tensor ({B},), not {value!r:.90}")
        row.copy_(value)
        if (low := min(row[row.isfinite()].tolist(), default=0.0)) < 0:
            raise ValueError(f"reward {name}: {low:.4g}, must be >= 0")
    return result
