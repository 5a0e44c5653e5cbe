from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from toprovar.exporter.checkpoints import open_checkpoint
from toprovar.exporter.demo.text_encoder import text_encoder_from_weights
from toprovar.exporter.infinity.tokenizer import quantise_residual
from toprovar.exporter.schedules import schedule_for
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.word_tokenizer import WordTokenizer, tokenizer_from_document, vocabulary_from_texts
from toprovar.tools.evaluation.classifier import FILE, crop, load_classifier, places_of
from toprovar.tools.train_demo import (
    captions,
    classifier_stage,
    finish,
    state,
    tokenizer_stage,
    train,
    transformer_stage,
)
from toprovar.tools.train_demo.bank import CAPTIONS_PER_SCENE, Bank, build_bank, mask_of
from toprovar.tools.train_demo.captions import COLOURS, Concept, Scene
from toprovar.tools.train_demo.clock import Budget, warm_cosine
from toprovar.tools.train_demo.data import Composer, SceneSampler, Sprites, load_sprites, sprites_from_images
from toprovar.tools.train_demo.forward import TrainingForward, sample
from toprovar.tools.train_demo.workers import start_workers, stop_workers

TOLERANCE = {
    "same_arithmetic": 1e-5,  # fp32, another order of the same sums
    "pixel": 2 / 255,  # sprites are stored in 8 bits
}
SCHEDULE = schedule_for(1.0, "0.25M")
CPU = torch.device("cpu")
TINY = dataclasses.replace(transformer_stage.SIZES["S"], depth=2, width=48, heads=3, ffn_width=96, text_width=32)
PHASE = dataclasses.replace(transformer_stage.PHASE_A, batch=3, scales=5)


@pytest.fixture(scope="module")
def sprites() -> Sprites:
    """Six concepts whose drawing is one shape; the colour tells the style."""
    concepts = [Concept(f"shape{i}", (), ("noto", "blob", "flat", "3d")) for i in range(6)]
    images = {}
    for i, concept in enumerate(concepts):
        for s, style in enumerate(concept.styles):
            image = Image.new("RGBA", (256, 256))
            ImageDraw.Draw(image).regular_polygon((128, 128, 110), 3 + i, fill=(60 * s, 200, 90, 255))
            images[i, style] = image
    return sprites_from_images(concepts, images)


@pytest.fixture
def words(sprites: Sprites) -> WordTokenizer:
    return WordTokenizer(vocabulary_from_texts(captions.vocabulary_texts(sprites.concepts)))


@pytest.fixture
def bank(words: WordTokenizer) -> Bank:
    """Random latents: the transformer's stages don't need pictures."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, words.size, (8, 2, 32), generator=generator).to(torch.int16)
    return Bank(torch.randn(8, 16, 32, 32, generator=generator).half(), {"single": ids}, {"single": 0})


def log(folder: Path) -> state.Log:
    return state.Log(folder / "log.jsonl")


def test_a_single_shows_its_background_and_its_sprite(sprites: Sprites) -> None:
    image = Composer(sprites).draw([Scene("single", (3,), "noto", "plain", "red")])
    assert image.shape == (1, 3, 256, 256)
    corner, centre = (image[0, :, 2, 2] + 1) / 2, (image[0, :, 128, 128] + 1) / 2
    torch.testing.assert_close(corner, torch.tensor(COLOURS["red"]) / 255, atol=TOLERANCE["pixel"], rtol=0)
    torch.testing.assert_close(centre, torch.tensor([0, 200, 90]) / 255, atol=TOLERANCE["pixel"], rtol=0)


def test_a_batch_keeps_the_order_of_its_scenes(sprites: Sprites) -> None:
    composer, sampler, rng = Composer(sprites), SceneSampler(sprites.concepts), random.Random(0)
    scenes = [sampler.draw(kind, rng) for kind in ("scene", "single", "pattern", "scene", "single")]
    together = composer.draw(scenes)
    alone = torch.cat([composer.draw([scene]) for scene in scenes])
    torch.testing.assert_close(together, alone)


def test_above_and_pair_put_objects_where_they_say(sprites: Sprites) -> None:
    above, pair = Composer(sprites).draw(
        [Scene("above", (0, 3), "3d", "plain", "white"), Scene("pair", (0, 3), "3d", "plain", "white")]
    )
    assert bool((above[:, 64, :72] > 0.99).all())
    assert not bool((above[:, 64, 72:184] > 0.99).all())
    assert bool((pair[:, :72, :] > 0.99).all())
    assert not bool((pair[:, 128, 8:120] > 0.99).all())


def test_training_quantiser_agrees_with_the_tokenizers() -> None:
    latent = torch.randn(2, 16, 32, 32, generator=torch.Generator().manual_seed(1))
    codes = tokenizer_stage.quantise_for_training(latent, SCHEDULE)
    assert torch.equal(codes.sums[-1], quantise_residual(latent, SCHEDULE).summed)
    assert len(codes.sums) == len(SCHEDULE)


def test_training_forward_equals_the_reference(bank: Bank, words: WordTokenizer) -> None:
    model = transformer_stage.DemoModel(TINY, words.size)
    model.initialize(3)
    ids = bank.captions["single"][:2, 0].long()
    ids[0, 9:] = 0
    codes = quantise_residual(bank.latents[:2].float(), SCHEDULE[:5])
    with torch.no_grad():
        rows = model.text(ids, mask_of(ids))
        forward = TrainingForward(model.infinity, SCHEDULE[:5], CPU, compile_block=False)
        ours = forward(rows, mask_of(ids), codes.inputs)
        reference = model.infinity.teacher_forced_logits(rows, mask_of(ids), codes.inputs, SCHEDULE[:5])
    torch.testing.assert_close(ours, reference, atol=TOLERANCE["same_arithmetic"], rtol=0)


def test_padding_does_not_change_a_prompts_rows(words: WordTokenizer) -> None:
    model = transformer_stage.DemoModel(TINY, words.size)
    model.initialize(3)
    short, long = torch.tensor([[5, 6, 2]]), torch.tensor([[5, 6, 2, 0, 0, 0]])
    with torch.no_grad():
        a, b = model.text(short, mask_of(short)), model.text(long, mask_of(long))
    torch.testing.assert_close(a, b[:, :3], atol=TOLERANCE["same_arithmetic"], rtol=0)


def test_flips_change_inputs_and_later_bits_only(bank: Bank) -> None:
    latents, schedule = bank.latents[:2].float(), SCHEDULE[:5]
    flips = transformer_stage.random_flips(2, schedule, 16, torch.Generator().manual_seed(0))
    clean, flipped = quantise_residual(latents, schedule), quantise_residual(latents, schedule, flips)
    assert torch.equal(clean.bits[0], flipped.bits[0])
    assert not torch.equal(clean.inputs[1], flipped.inputs[1])
    assert not torch.equal(clean.bits[-1], flipped.bits[-1])


def test_bit_loss_of_even_logits_is_log_two() -> None:
    bits = [torch.ones(2, 1, 1, 16), torch.zeros(2, 2, 2, 16)]
    losses = transformer_stage.bit_losses(torch.zeros(2, 5, 32), bits)
    torch.testing.assert_close(losses, torch.full((2,), 0.6931472))


def test_training_resumes_where_it_stopped(tmp_path: Path, bank: Bank, words: WordTokenizer) -> None:
    def run(steps: int, span: tuple[float, float]) -> None:
        transformer_stage.train_transformer(
            tmp_path,
            bank,
            words,
            SCHEDULE,
            PHASE,
            600,
            config=TINY,
            seed=1,
            compile_model=False,
            log=log(tmp_path),
            max_steps=steps,
            span=span,
        )

    run(2, (0.0, 0.5))
    saved = state.load_required(tmp_path, "transformer", "transformer-a")
    model = transformer_stage.DemoModel(TINY, words.size)
    ema = state.Ema(dict(model.named_parameters()))
    assert transformer_stage.restore_model(tmp_path, model, ema, None) == "full"
    run(1, (0.5, 1.0))
    assert json.loads((tmp_path / "transformer.json").read_text())["step"] == 3
    (tmp_path / "full_state.safetensors").unlink()  # only the small pieces came back
    assert transformer_stage.restore_model(tmp_path, model, ema, None) == "weights"
    assert ema.step == 3
    name = "infinity.word_embed.weight"
    assert not torch.equal(saved[name], dict(model.named_parameters())[name].half().float())
    run(1, (0.0, 1.0))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["resumed"] for line in lines if line.get("event") == "start"] == ["none", "full", "weights"]


def test_tokenizer_trains_saves_and_packs(tmp_path: Path, sprites: Sprites, words: WordTokenizer) -> None:
    composer = Composer(sprites)
    tokenizer = tokenizer_stage.train_tokenizer(
        tmp_path,
        composer,
        SCHEDULE,
        600,
        seed=1,
        batch=1,
        compile_model=False,
        log=log(tmp_path),
        max_steps=1,
        widths=(32, 32, 32, 32),
    )
    bank = build_bank(tokenizer, composer, words, seed=1, pool=3, singles=1, versions=CAPTIONS_PER_SCENE)
    assert bank.latents.shape == (4, 16, 32, 32)
    assert bank.captions["single"].shape == (1, CAPTIONS_PER_SCENE["single"], captions.MAX_CAPTION_TOKENS)
    model = transformer_stage.DemoModel(TINY, words.size)
    model.initialize(2)
    images = {"single": composer.draw([SceneSampler(sprites.concepts).draw("single", random.Random(0))])}
    facts = finish.write_demo(tmp_path / "demo", model, tokenizer, words, SCHEDULE, images, {"seed": "1"})
    assert facts["decoder_dtype"] in ("int8", "fp16")
    encoder = text_encoder_from_weights(dict(open_checkpoint(tmp_path / "demo" / finish.WEIGHTS_FILE).tensors))
    vocabulary = read_json(tmp_path / "demo" / finish.VOCABULARY_FILE)
    assert tokenizer_from_document(vocabulary, "vocabulary").vocabulary == words.vocabulary
    ids = torch.tensor([[4, 5, 2]])
    with torch.no_grad():
        torch.testing.assert_close(encoder(ids, ids != 0), model.text(ids, ids != 0))


def test_sampling_fills_the_latent_grid(words: WordTokenizer) -> None:
    model = transformer_stage.DemoModel(TINY, words.size)
    model.initialize(3)
    schedule = SCHEDULE[:4]
    forward = TrainingForward(model.infinity, schedule, CPU, compile_block=False)
    mask = torch.ones(2, 3, dtype=torch.bool)

    def draw() -> torch.Tensor:
        return sample(
            forward,
            schedule,
            torch.zeros(2, 3, TINY.text_width),
            mask,
            full=(32, 32),
            guidance=2.0,
            temperature=0.7,
            generator=torch.Generator().manual_seed(4),
        )

    assert draw().shape == (2, 16, 32, 32)
    assert torch.equal(draw(), draw())


def test_large_states_are_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PIECE_BYTES", 1000)
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}
    assert len(state.save_pieces(tensors, tmp_path, "x")) == 3
    loaded = state.load_pieces(tmp_path, "x")
    assert loaded is not None
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert len(state.save_pieces({"t0": tensors["t0"]}, tmp_path, "x")) == 1
    assert len(list(tmp_path.glob("x-*"))) == 1


def test_average_starts_quickly() -> None:
    weights = {"w": torch.zeros(3)}
    ema = state.Ema(weights)
    weights["w"].fill_(1.0)
    ema.update()
    assert float(ema.tensors()["w"][0]) == pytest.approx(0.9)


def test_schedule_warms_up_and_ends_at_its_floor() -> None:
    assert warm_cosine(0.0, 0, 10, 0.1) == pytest.approx(0.1)
    assert warm_cosine(1.0, 100, 10, 0.1) == pytest.approx(0.1)
    budget = Budget(100, max_steps=4)
    budget.step = 4
    assert budget.over
    assert budget.progress == 1.0


def test_stages_are_parsed_and_wrong_ones_are_refused() -> None:
    assert train.parse_stage("transformer-b=rest@0.4:1") == train.StageRequest("transformer-b", None, (0.4, 1.0))
    assert train.parse_stage("tokenizer=360").seconds == 360
    with pytest.raises(ToprovarError, match="unknown stage 'polish'"):
        train.parse_stage("polish")
    with pytest.raises(ToprovarError, match="not within 0:1"):
        train.parse_stage("tokenizer=1@0.5:0.2")


def test_missing_pack_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ToprovarError, match="prepare --out"):
        load_sprites(tmp_path)


def test_finished_results_replace_the_state_copies(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "demo").mkdir(parents=True)
    results = ["metrics.json", "log.jsonl", "sheet.png", "classifier.safetensors"]
    names = [*results, "transformer.json", "tokenizer-0.safetensors", "transformer_ema-0.safetensors"]
    shipped = ["infinity_demo.safetensors", "text_encoder.safetensors", "tokenizer_demo.safetensors", "vocabulary.json"]
    for name in [*names, "transformer-0.safetensors", "sheet_tokenizer.png", *(f"demo/{name}" for name in shipped)]:
        (run / name).write_bytes(b"x")
    session = object.__new__(train.Session)
    session.run, session.options = run, argparse.Namespace(out=out)
    session.copy_results(finished=False)
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    session.copy_results(finished=True)
    assert sorted(path.name for path in out.iterdir()) == sorted([*results, *shipped])


@pytest.mark.slow
def test_decoder_stage_leaves_the_codes_alone(tmp_path: Path, sprites: Sprites) -> None:
    composer = Composer(sprites)
    before = tokenizer_stage.new_tokenizer(3, (32, 32, 32, 32))
    state.save_pieces(state.as_fp16(before.state_dict()), tmp_path, "tokenizer")
    before = tokenizer_stage.load_tokenizer(tmp_path, CPU)
    after = tokenizer_stage.train_tokenizer(
        tmp_path,
        composer,
        SCHEDULE,
        600,
        seed=1,
        batch=1,
        compile_model=False,
        log=log(tmp_path),
        max_steps=1,
        part=tokenizer_stage.DECODER,
    )
    image = composer.draw([Scene("single", (1,), "flat", "plain", "teal")])
    with torch.no_grad():
        assert torch.equal(before.encode(image), after.encode(image))
        assert not torch.equal(before.decode(before.encode(image)), after.decode(before.encode(image)))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"single", "pattern", "scene"} <= set(lines[-1]["psnr_db"])


@pytest.mark.slow
def test_classifier_learns_the_drawings(tmp_path: Path, sprites: Sprites) -> None:
    composer = Composer(sprites)
    tokenizer = tokenizer_stage.new_tokenizer(3, (32, 32, 32, 32)).eval()
    metrics = classifier_stage.train_classifier(
        tmp_path,
        composer,
        tokenizer,
        SCHEDULE,
        600,
        seed=1,
        pool=48,
        batch=32,
        log=log(tmp_path),
        max_steps=60,
        spoil=0.0,
    )
    clean = metrics["clean"]
    assert isinstance(clean, dict)
    assert clean["style"] > 0.6  # four colours; chance is 0.25
    assert clean["concept"] > 0.3  # six polygons and "nothing"; chance is 0.17
    classifier = load_classifier(tmp_path / FILE)
    judged = classifier(crop(composer.draw([Scene("single", (2,), "noto", "plain", "red")]), places_of("single")[0]))
    assert judged.concepts.shape == (1, 7)
    assert judged.styles.shape == (1, 4)


def test_unreadable_classifier_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a classifier")
    with pytest.raises(ToprovarError, match="not a readable drawing classifier") as error:
        load_classifier(tmp_path / FILE)
    assert error.value.hint
    assert "classifier" in error.value.hint


def _worker(rank: int, folder: str) -> None:
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "WORLD_SIZE": "2", "RANK": str(rank)}
    workers = start_workers("cpu")
    parameters = [torch.zeros(3), torch.zeros(2, 2)]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(rank + 10 * i))
    workers.average_gradients(parameters)
    workers.wait()
    decided = workers.from_first(float(rank), 7.0)
    gradients = [p.grad.flatten().tolist() for p in parameters if p.grad is not None]
    (Path(folder) / f"{rank}.json").write_text(json.dumps([gradients, decided]))
    stop_workers(workers)


def test_two_workers_share_gradients_and_decisions(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_worker, (str(tmp_path),), nprocs=2)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1] == [[[0.5] * 3, [10.5] * 4], [0.0, 7.0]]
