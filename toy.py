"""A miniature Stable Diffusion 3 and its world, so that the whole method runs on a laptop CPU.

Ours; the paper has no such thing. `toy/` is a real StableDiffusion3Pipeline folder, every part
small, that the other programs load like any other: nothing outside this file knows it is a toy.
    world      64 x 64 drawings: one to three coloured shapes and a word of three letters, with
               captions such as: a red circle left of a green square with the text "CAT"
    facts      {"prompt", "objects": [[colour, shape], ...] left to right, "text": word or null};
               a line of prompts/toy-*.jsonl, handed to rewards as metadata
    rewards    ocr, geneval, clipscore, preference, detail; judges: strict, second_clip;
               each f(images (B,3,64,64) in [0,1], prompts, metadata) -> (B,) float in [0,1]
    render     the perfect picture of a prompt: the proposal pi+ of the gain estimate
The base is imperfect on purpose (`build_base`): letters half right, facts mixed up. Work for RL.
    python toy.py --build           # what is missing of toy/ and prompts/, seeded
"""

import argparse
import copy
import functools
import json
import math
import random
import zlib
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent / "toy"
SIZE, ZOOM, TEXT_TOP, CELL = 64, 4, 42, 13           # side, drawn x larger, text band, letter pitch
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220),
           "yellow": (240, 200, 40), "purple": (150, 60, 190), "orange": (245, 130, 30)}
SHAPES = ["circle", "square", "triangle", "star"]
BACKGROUNDS = [(250, 250, 250), (226, 236, 250), (250, 238, 220), (224, 226, 228)]
INK, LENGTH, SHIFT = (30, 30, 30), 20, 1.0          # tokens per caption; the scheduler's shift
WORDS = [a + b + c for a in "BCDFGHJKLMNPRSTVWXZ" for b in "AEIOU" for c in "BCDFGKLMNPRSTXYZ"
         if a + b + c not in {"RED", "SEX", "FAG", "TIT", "CUM", "KUM", "NIG", "COC", "DIC"}]
# matplotlib ships this font, so the pictures are the same everywhere; 21 px
FONT = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono-Bold.ttf", 21 * ZOOM)


# ---------------------------------------------------------------- the world
def caption(objects, text, flip=False):
    """objects: left-to-right [colour, shape] pairs; text: word or None; flip: say `right of`."""
    named = [f"{'an' if c[0] in 'aeiou' else 'a'} {c} {s}" for c, s in objects]
    phrase = " right of ".join(named[::-1]) if flip else " left of ".join(named)
    if len(named) > 1 and len(set(named)) == 1:                           # all alike: counted
        phrase = f"{'two' if len(named) == 2 else 'three'} {' '.join(objects[0])}s"
    return phrase + (f' with the text "{text}"' if text else "")


def scene(rng, text=None):
    """One random scene: {"prompt", "objects" (left to right), "text" (or None)}."""
    alike = rng.random() < 0.5                           # one to three of a kind, or any two
    objects = [[rng.choice(list(COLOURS)), rng.choice(SHAPES)] for _ in range(1 if alike else 2)]
    objects *= rng.randint(1, 3) if alike else 1
    word = rng.choice(WORDS) if (rng.random() < 0.8 if text is None else text) else None
    return {"prompt": caption(objects, word, rng.random() < 0.5), "objects": objects, "text": word}


def outline(shape, x, y, r):
    """Corner points of a shape with centre (x, y) and radius r; the circle has forty corners."""
    if shape == "square":
        return [(x + a * .85 * r, y + b * .85 * r) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    if shape == "triangle":
        return [(x, y - r), (x + r, y + .85 * r), (x - r, y + .85 * r)]
    n, radii = (40, (r, r)) if shape == "circle" else (10, (1.1 * r, .5 * r))
    return [(x + radii[k % 2] * math.sin(2 * math.pi * k / n),
             y - radii[k % 2] * math.cos(2 * math.pi * k / n)) for k in range(n)]


def prompt_list(n, held, seed):
    """n different scenes with a word. One in five words and one in five arrangements are kept out
    of the training prompts; held: word and objects both of those, or neither."""
    rng, scenes = random.Random(seed), {}
    while len(scenes) < n:
        facts = scene(rng, text=True)
        kept = [zlib.crc32(repr(facts[key]).encode()) % 5 == 0 for key in ("text", "objects")]
        if kept == [held, held]:
            scenes[facts["prompt"]] = facts
    return list(scenes.values())


def draw(facts, rng=None):
    """The perfect picture of a scene, a Pillow image; rng jitters places, sizes, background."""
    move = (lambda a: rng.uniform(-a, a)) if rng else (lambda a: 0.0)
    background = rng.choice(BACKGROUNDS) if rng else BACKGROUNDS[0]
    image = Image.new("RGB", (SIZE * ZOOM, SIZE * ZOOM), background)
    pen, n = ImageDraw.Draw(image), len(facts["objects"])
    for k, (colour, shape) in enumerate(facts["objects"]):
        x = {1: [32], 2: [17, 47], 3: [12, 32, 52]}[n][k] + move(1)
        y, r = 22 + move(2), (7.8 if n == 3 else 10.5) + move(0.5)
        pen.polygon(outline(shape, x * ZOOM, y * ZOOM, r * ZOOM), fill=COLOURS[colour])
    if facts.get("text"):
        x, y = 32 + move(2), 52 + move(1)
        for k, letter in enumerate(facts["text"]):
            pen.text(((x + (k - 1) * CELL) * ZOOM, y * ZOOM), letter, INK, FONT, anchor="mm")
    return image.resize((SIZE, SIZE), Image.BOX)


def to_tensor(images):
    """Pillow images -> (B, 3, H, W) float in [0, 1]."""
    return torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2) / 255.0


def render(prompts, metadata, seed):
    """Proposal pi+: a perfect picture for each prompt, (B, 3, 64, 64) in [0, 1]."""
    return to_tensor([draw(f, random.Random(f"{seed} {k}")) for k, f in enumerate(metadata)])


# ---------------------------------------------------------------- reading a picture
@functools.cache
def letter_templates():
    """(26, 1, h, w) zero-mean unit-norm darkness of each letter alone."""
    w, h = CELL * ZOOM, 20 * ZOOM
    images = [Image.new("RGB", (w, h)) for _ in range(26)]
    for k, image in enumerate(images):
        ImageDraw.Draw(image).text((w / 2, h / 2), chr(65 + k), "white", FONT, anchor="mm")
    t = to_tensor([i.resize((CELL, 20), Image.BOX) for i in images])[:, :1]
    return F.normalize(t - t.mean((2, 3), keepdim=True), dim=(2, 3))


def read_text(images, tol=0.6):
    """The word in the text band, B strings of three letters. Each cell takes the letter of largest
    normalised cross-correlation with its template, over a few pixels of shift; `?` below tol."""
    t = letter_templates()
    h, w = t.shape[2:]
    dark = 1 - images.float().cpu().mean(1, keepdim=True)[:, :, TEXT_TOP - 3:]        # (B,1,25,64)
    dark = F.pad(dark, (2, 2, 0, 2), mode="replicate")
    var = F.avg_pool2d(dark ** 2, (h, w), 1) - F.avg_pool2d(dark, (h, w), 1) ** 2
    fit = F.conv2d(dark, t) / (h * w * var.clamp_min(1e-3)).sqrt()                    # (B,26,y,x)
    left = [34 + (k - 1) * CELL - CELL // 2 for k in range(3)]                        # with padding
    best = torch.stack([fit[..., max(0, x - 4):x + 5].amax((2, 3)) for x in left], 1).max(2)
    return ["".join(chr(65 + k) if s > tol else "?" for k, s in zip(ks, ss))
            for ks, ss in zip(best.indices.tolist(), best.values.tolist())]


def find_objects(images):
    """Coloured shapes in each picture, left to right: B lists of [colour, shape]. Every pixel goes
    to its nearest colour of the world; a connected region of at least 45 pixels is an object; its
    shape is the outline that overlaps its mask best (IoU on 16 x 16)."""
    palette = torch.tensor([*COLOURS.values(), *BACKGROUNDS, INK]) / 255.0            # (11,3)
    pixels = images.float().cpu().permute(0, 2, 3, 1).flatten(1, 2)                   # (B,4096,3)
    found = []
    for picture in torch.cdist(pixels, palette).argmin(-1).view(-1, SIZE, SIZE).numpy():
        objects = []
        for k, colour in enumerate(COLOURS):
            _, label, stats, centre = cv2.connectedComponentsWithStats(np.uint8(picture == k))
            for c, (x, y, w, h, area) in enumerate(stats[1:], 1):
                if area >= max(45, 0.28 * w * h):        # a rim of blended pixels is no object
                    mask = cv2.resize((label[y:y + h, x:x + w] == c).astype(np.float32), (16, 16),
                                      interpolation=cv2.INTER_AREA) > 0.5
                    iou = [(mask & m).sum() / (mask | m).sum() for m in shape_masks()]
                    objects.append((centre[c][0], colour, SHAPES[int(np.argmax(iou))]))
        found.append([[colour, shape] for _, colour, shape in sorted(objects)])
    return found


@functools.cache
def shape_masks():
    """Four (16, 16) boolean masks, one per shape, each filling its bounding box."""
    images = [Image.new("L", (256, 256)) for _ in SHAPES]
    for image, shape in zip(images, SHAPES):
        ImageDraw.Draw(image).polygon(outline(shape, 128, 128, 100), fill=255)
    return [np.asarray(i.crop(i.getbbox()).resize((16, 16), Image.BOX)) > 127 for i in images]


# ---------------------------------------------------------------- rewards and judges
def ocr(images, prompts, metadata):
    """Share of the word's three letters read right, in [0, 1]; template reading."""
    return torch.tensor([sum(a == b for a, b in zip(read, facts["text"])) / 3
                         for read, facts in zip(read_text(images), metadata)])


def geneval(images, prompts, metadata):
    """Graded facts in [0, 1]: mean of count right and shares of colours, shapes, places right."""
    scores = []
    for found, wanted in zip(find_objects(images), (f["objects"] for f in metadata)):
        both = [Counter(f[k] for f in found) & Counter(w[k] for w in wanted) for k in (0, 1)]
        right = sum(c.total() for c in both) + sum(f == w for f, w in zip(found, wanted))
        scores.append(((len(found) == len(wanted)) + right / max(len(found), len(wanted))) / 4)
    return torch.tensor(scores)


def strict(images, prompts, metadata):
    """1 where every object has its colour, shape and place and nothing else is there, else 0."""
    return torch.tensor([float(o == f["objects"]) for o, f in zip(find_objects(images), metadata)])


def detail(images, prompts, metadata):
    """Fine detail in [0, 1]: share of pixels that lie in a flat area or on a sharp edge. The range
    of a 3 x 3 neighbourhood is near 0 inside a clean area and large on a clean edge; ripples,
    smears and blur lie between. When it is settled: see the README."""
    x = images.float()
    spread = (F.max_pool2d(x, 3, 1, 1) + F.max_pool2d(-x, 3, 1, 1)).amax(1)         # (B,64,64)
    return 1 - ((spread > 0.06) & (spread < 0.4)).float().mean((1, 2))


@functools.cache
def clip(name):
    """A tiny CLIPModel shipped in toy/ and the tokenizer that all of them share."""
    from transformers import CLIPModel, CLIPTokenizer
    return (CLIPModel.from_pretrained(FOLDER / name, dtype=torch.float32).eval(),
            CLIPTokenizer.from_pretrained(FOLDER / "tokenizer"))


def cosine(model, tokenizer, images, prompts):
    """Cosine of each picture with its own caption, (B,) in [-1, 1]."""
    tokens = tokenizer(list(prompts), padding="max_length", truncation=True, return_tensors="pt")
    out = model(pixel_values=images.float().cpu() * 2 - 1, **tokens)
    return (out.image_embeds * out.text_embeds).sum(-1)


@torch.no_grad()
def clip_score(name, images, prompts, metadata):
    """Cosine of a model in toy/, clamped at 0, in [0, 1]: the three below."""
    return cosine(*clip(name), images, prompts).clamp_min(0)


clipscore = functools.partial(clip_score, "clip")            # a contrastive model of the world
preference = functools.partial(clip_score, "preference")     # a Bradley-Terry preference model
second_clip = functools.partial(clip_score, "judge")         # judge: another seed, size and data


# ---------------------------------------------------------------- the build of toy/
def dataset(n, seed):
    """n random scenes and their pictures, uint8 (n, 3, 64, 64)."""
    rng = random.Random(seed)
    scenes = [scene(rng) for _ in range(n)]
    return scenes, (to_tensor([draw(s, rng) for s in scenes]) * 255).round().byte()


def minimise(loss, params, steps, lr, name):
    """AdamW on loss() with a one-cycle learning rate and clipped gradients."""
    params = [p for p in params if p.requires_grad]
    opt = torch.optim.AdamW(params, lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=steps, pct_start=0.1)
    for _ in (bar := tqdm(range(steps), desc=name, mininterval=10)):
        opt.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        schedule.step()
        bar.set_postfix(loss=f"{value.item():.4f}", refresh=False)


def build_vae(pictures, gen, steps=1200, decoder_steps=800, batch=8):
    """Train the autoencoder, then its decoder alone on slightly noised latents, as a denoiser's."""
    from diffusers import AutoencoderKL
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[16, 32, 64], layers_per_block=1, latent_channels=4, norm_num_groups=8,
        sample_size=SIZE, use_quant_conv=False, use_post_quant_conv=False)

    def loss(noise=0.0):
        x = pictures[torch.randint(len(pictures), (batch,), generator=gen)] / 127.5 - 1
        dist = vae.encode(x).latent_dist
        z = dist.sample(gen)                                                          # (B,4,16,16)
        amount = noise * torch.rand(batch, 1, 1, 1, generator=gen) * z.detach().std()
        error = vae.decode(z + amount * torch.randn(z.shape, generator=gen)).sample - x
        return error.abs().mean() + error.square().mean() + 1e-3 * dist.kl().mean() / x[0].numel()

    minimise(loss, vae.parameters(), steps, 1.5e-3, "autoencoder")
    vae.encoder.requires_grad_(False)
    minimise(lambda: loss(0.1), vae.decoder.parameters(), decoder_steps, 1.5e-3, "decoder")
    z = encode(vae, pictures[:512])
    vae.register_to_config(scaling_factor=1 / z.std().item(), shift_factor=z.mean().item())
    return vae.requires_grad_(False).eval()


@torch.no_grad()
def encode(vae, pictures):
    """Mean latents of uint8 pictures, (n, 4, 16, 16), not yet shifted and scaled."""
    return torch.cat([vae.encode(p / 127.5 - 1).latent_dist.mean for p in pictures.split(64)])


def build_pipeline(vae):
    """Stable Diffusion 3 with every part small; all but the autoencoder random."""
    import diffusers
    from transformers import AddedToken, CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer
    letters = [*"abcdefghijklmnopqrstuvwxyz", '"']   # every word of the grammar is one token,
    vocab = [*letters, *(c + "</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer({w: k for k, w in enumerate(vocab)}, [], model_max_length=LENGTH)
    grammar = [*COLOURS, *SHAPES, *(s + "s" for s in SHAPES),
               *"an two three left right of with the text".split()]
    tokenizer.add_tokens([AddedToken(w, single_word=True) for w in grammar])  # any other is spelled
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=SIZE // 4, patch_size=2, in_channels=4, out_channels=4, num_layers=4,
        attention_head_dim=32, num_attention_heads=4, joint_attention_dim=128, qk_norm="rms_norm",
        caption_projection_dim=128, pooled_projection_dim=128, pos_embed_max_size=SIZE // 8)
    text = CLIPTextConfig(**text_config(tokenizer))
    return diffusers.StableDiffusion3Pipeline(
        vae=vae, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_encoder=CLIPTextModelWithProjection(text), tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(text), tokenizer_2=tokenizer,
        transformer=transformer, text_encoder_3=None, tokenizer_3=None)


def text_config(tokenizer):
    """The one size of text tower used everywhere here."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256,
                num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=LENGTH,
                projection_dim=64, bos_token_id=bos, eos_token_id=eos, pad_token_id=eos)


def build_base(pipe, scenes, pictures, stage, steps, wrong, batch=64):
    """Flow matching on the world, text encoders jointly. A share `wrong` of the captions has one
    fact wrong, as captions on the web do: the base then draws what it was told only sometimes."""
    vae, rng, gen = pipe.vae.config, random.Random(stage), torch.Generator().manual_seed(stage)
    x0s = (encode(pipe.vae, pictures) - vae.shift_factor) * vae.scaling_factor

    def loss():
        pick = torch.randint(len(x0s), (batch,), generator=gen)
        facts = [mutate(scenes[k], rng) if rng.random() < wrong else scenes[k] for k in pick]
        drop = torch.rand(batch, generator=gen) < 0.1                     # for guidance
        prompts = ["" if d else f["prompt"] for f, d in zip(facts, drop)]
        text, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=0)
        t = torch.sigmoid(torch.randn(batch, 1, 1, 1, generator=gen))
        x0, noise = x0s[pick], torch.randn(x0s[pick].shape, generator=gen)
        v = pipe.transformer((1 - t) * x0 + t * noise, timestep=1000 * t.flatten(),
                             encoder_hidden_states=text, pooled_projections=pooled).sample
        return (v - (noise - x0)).square().mean()

    parts = torch.nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])
    minimise(loss, parts.train().parameters(), steps, 1e-3 if wrong else 2e-3, "base")


def degrade(images, gen):
    """Blur, noise, low contrast or a smeared patch, one kind and strength per picture."""
    b = len(images)
    a = torch.rand(b, 1, 1, 1, generator=gen) * 0.8 + 0.2
    kind = torch.randint(4, (b,), generator=gen)
    blur = F.avg_pool2d(F.pad(images, (2, 2, 2, 2), mode="replicate"), 5, 1)
    rough = F.interpolate(torch.rand(b, 3, 8, 8, generator=gen), scale_factor=8, mode="bilinear")
    noisy = images + 0.25 * torch.randn(images.shape, generator=gen)
    worse = torch.stack([blur, noisy, rough, torch.where(rough > 0.4, images.roll(3, 3), images)])
    return (images + a * (worse[kind, torch.arange(b)] - images)).clamp(0, 1)         # (B,3,64,64)


def mutate(facts, rng):
    """The scene with one fact changed: a letter, a colour, a shape, the order or the count."""
    objects, text = [list(o) for o in facts["objects"]], facts["text"]
    while objects == facts["objects"] and text == facts["text"]:
        kind = rng.choice(["text", "text", "colour", "shape", "order", "count"])
        k, same = rng.randrange(len(objects)), len({tuple(o) for o in objects}) == 1
        if kind == "text" and text:
            j = rng.randrange(3)
            text = text[:j] + rng.choice("AEIOU" if j == 1 else "BCDFGKLMNPRSTXZ") + text[j + 1:]
        elif kind in ("colour", "shape"):
            value = rng.choice(list(COLOURS) if kind == "colour" else SHAPES)
            for o in objects if same else [objects[k]]:
                o[kind == "shape"] = value
        elif kind == "order":
            objects = objects[::-1]
        elif kind == "count" and same:
            objects = [objects[0]] * rng.randint(1, 3)
    return {"prompt": caption(objects, text, rng.random() < 0.5), "objects": objects, "text": text}


def build_clip(tokenizer, scenes, pictures, seed, width, layers, steps=1000, batch=64):
    """Contrastive training with one hard negative (`mutate`) per caption beside the batch."""
    from transformers import CLIPConfig, CLIPModel
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(
        text_config=text_config(tokenizer), projection_dim=64, vision_config=dict(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 32, image_size=SIZE, patch_size=8, projection_dim=64)))
    rng, gen, own = random.Random(seed), torch.Generator().manual_seed(seed), torch.arange(batch)

    def loss():
        pick = torch.randint(len(pictures), (batch,), generator=gen)
        x = pictures[pick] / 255.0
        x = x + 0.5 * torch.rand(batch, 1, 1, 1, generator=gen) * (degrade(x, gen) - x)
        facts = [scenes[k] for k in pick.tolist()]
        texts = [f["prompt"] for f in facts] + [mutate(f, rng)["prompt"] for f in facts]
        tokens = tokenizer(texts, padding="max_length", return_tensors="pt")
        logits = model(pixel_values=x * 2 - 1, **tokens).logits_per_image             # (B,2B)
        return F.cross_entropy(logits, own) + F.cross_entropy(logits[:, :batch].T, own)

    minimise(loss, model.train().parameters(), steps, 1e-3, f"contrastive {seed}")
    return model.eval()


def build_preference(model, tokenizer, scenes, pictures, steps=400, batch=24):
    """Bradley-Terry from the contrastive model: the perfect picture beats a degraded one and one
    with a fact wrong. -log sigmoid(score of the better - score of the worse)."""
    model = copy.deepcopy(model)
    rng, gen = random.Random(7), torch.Generator().manual_seed(7)

    def loss():
        pick = torch.randint(len(pictures), (2 * batch,), generator=gen)
        facts, good = [scenes[k] for k in pick.tolist()], pictures[pick] / 255.0
        wrong = to_tensor([draw(mutate(f, rng), rng) for f in facts[:batch]])
        bad = torch.cat([wrong, degrade(good[batch:], gen)])
        score = functools.partial(cosine, model, tokenizer, prompts=[f["prompt"] for f in facts])
        return -F.logsigmoid(model.logit_scale.exp() * (score(good) - score(bad))).mean()

    minimise(loss, model.train().parameters(), steps, 5e-4, "preference")
    return model.eval()


def main(argv=None):
    """Build every part from its own seed, and prompts/ beside it; a part that is there is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: parser.exit(2, f"toy.py: {message}\n")
    parser.add_argument("--build", action="store_true", required=True, help="build what is missing")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to build")
    out = parser.parse_args(argv).out
    lists = out.parent / "prompts"
    lists.mkdir(parents=True, exist_ok=True)
    for name, n, held, seed in (("toy-train", 512, False, 1), ("toy-heldout", 256, True, 2)):
        lines = (json.dumps(facts) + "\n" for facts in prompt_list(n, held, seed))
        (lists / f"{name}.jsonl").write_text("".join(lines))
    world = dataset(12000, 1)                                             # scenes, pictures
    if not (out / "model_index.json").exists():
        torch.manual_seed(0)
        pipe = build_pipeline(build_vae(world[1], torch.Generator().manual_seed(0)))
        for stage, (steps, wrong) in enumerate(((600, 0), (600, 0), (300, 0.5))):
            build_base(pipe, *world, stage, steps, wrong)
        pipe.to(torch.float16).save_pretrained(out)
    from transformers import CLIPTokenizer
    tokenizer = CLIPTokenizer.from_pretrained(out / "tokenizer")
    if not (out / "clip").exists():
        judge = build_clip(tokenizer, *dataset(12000, 2), 12, width=64, layers=4)
        judge.half().save_pretrained(out / "judge")
        model = build_clip(tokenizer, *world, 11, width=96, layers=3)
        build_preference(model, tokenizer, *world).half().save_pretrained(out / "preference")
        model.half().save_pretrained(out / "clip")
    print(f"{out}: {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
