"""One run: calibrate if asked to, write, check that it loads, and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from app.errors import CheckpointError, ConfigError
from app.quantization.compressed_form import CompressedForm, compressed_form, scheme
from app.quantize.answers import count_right_answers
from app.quantize.awq import InputScaleSearch
from app.quantize.kv_scales import KVScaleCalibration
from app.quantize.layerwise import LayerwiseModel
from app.quantize.questions import read_questions
from app.quantize.report import AccuracyReport, compare
from app.quantize.settings import QuantizeSettings
from app.quantize.source import LinearModule, Source
from app.quantize.tensor_change import TensorChange
from app.quantize.texts import OWN, Texts
from app.quantize.token_batch import TokenBatch
from app.quantize.writing import CheckpointWriter
from app.version import VERSION
from app.worker.device import select_device

Say = Callable[[str], object]


@dataclass(slots=True, frozen=True)
class Calibration:
    """Holds what texts decided."""

    changes: Mapping[str, TensorChange] = field(default_factory=dict)  # of tensors of the checkpoint
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)  # tensors to be added


def quantize(settings: QuantizeSettings, say: Say = lambda line: None) -> AccuracyReport | None:
    """Write the checkpoint that `settings` asks for, and return its report if there is to be one.

    ConfigError, CheckpointError and UnsupportedError say what cannot be, before anything is written or with what was
    written removed.
    """
    source = Source.open(settings.model)
    form = None if settings.form is None else compressed_form(settings.form, settings.group_size)
    chosen = source.chosen(form)
    texts = _texts(settings, source)
    questions = read_questions(source.info.directory, settings.questions if settings.report else 0)
    writer = CheckpointWriter(settings.output, settings.shard_bytes)
    try:
        calibration = _calibrate(settings, source, form, chosen, texts, say)
        try:
            _write(settings, source, form, chosen, calibration, writer)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"OUTPUT: cannot write {writer.partial}: {error}") from error
        _check_loads(settings, writer)
    except BaseException:
        writer.abandon()
        raise
    writer.publish()
    say(f"{len(chosen)} of {len(source.linears)} linear layers quantized; {writer.num_bytes / 1e6:,.1f} MB of tensors")
    return None if texts is None or not settings.report else _report(settings, source, texts, questions, writer, say)


def _texts(settings: QuantizeSettings, source: Source) -> Texts | None:
    if not settings.calibrates and not settings.report:
        return None
    directory, info = source.info.directory, source.info
    length = min(settings.length, info.max_position_embeddings)
    return Texts.read(settings.calibration, directory, settings.samples, length, info.vocab_size)


def _calibrate(
    settings: QuantizeSettings,
    source: Source,
    form: CompressedForm | None,
    chosen: Sequence[LinearModule],
    texts: Texts | None,
    say: Say,
) -> Calibration:
    """Run the plain model over the texts once, for all that is to be found out."""
    if not settings.calibrates:
        return Calibration()
    assert texts is not None
    batches = TokenBatch.split(texts.calibration)
    say(f"calibrating with {len(texts.calibration)} texts, {sum(map(len, texts.calibration))} tokens")
    kv = None if settings.kv is None else KVScaleCalibration(source.found, settings.kv)
    awq = None
    if settings.awq:
        assert form is not None
        weights = [linear.weight for linear in chosen]
        awq = InputScaleSearch(source.tensors, source.names, weights, form.round, len(batches))
    model = LayerwiseModel(str(source.info.directory), settings.device)
    model.run(batches, [observer for observer in (kv, awq) if observer is not None])
    return Calibration({} if awq is None else awq.changes, {} if kv is None else kv.scales)


@torch.inference_mode()
def _write(
    settings: QuantizeSettings,
    source: Source,
    form: CompressedForm | None,
    chosen: Sequence[LinearModule],
    calibration: Calibration,
    writer: CheckpointWriter,
) -> None:
    """One tensor after another."""
    device, _ = select_device(settings.device, 0)
    modules = {linear.weight: linear.name for linear in chosen}
    for name, stored in tqdm(source.tensors.items(), desc="tensors", leave=False, disable=None):
        tensor, change = stored.whole(), calibration.changes.get(name)
        if name in modules:
            assert form is not None
            weight = tensor.to(device)
            if not weight.isfinite().all():
                raise CheckpointError(f"MODEL: {name} holds numbers that are not finite", param="model")
            weight = weight if change is None else change.apply(weight)
            for leaf, part in form.tensors(weight).items():
                writer.add(f"{modules[name]}.{leaf}", part)
        else:
            writer.add(name, tensor if change is None else change.apply(tensor).to(tensor.dtype))
    for name, tensor in calibration.scales.items():
        writer.add(name, tensor)
    config = json.loads((source.info.directory / "config.json").read_text(encoding="utf-8"))
    per = {None: None, "tensor": "tensor", "head": "attn_head"}[settings.kv]
    config["quantization_config"] = scheme(form, source.ignored(chosen), per)
    writer.finish(source.info.directory, config)


def _check_loads(settings: QuantizeSettings, writer: CheckpointWriter) -> None:
    """Checks that the result could be loaded: what nobody could load gets no name."""
    try:
        LayerwiseModel(str(writer.partial), settings.device, _kv(settings)).load(0, num_blocks=1)
    except ConfigError as error:
        raise ConfigError(f"--device: it cannot be checked here ({error.message}); --device cpu can") from error


def _report(
    settings: QuantizeSettings,
    source: Source,
    texts: Texts,
    questions: Sequence[Mapping[str, Any]],
    writer: CheckpointWriter,
    say: Say,
) -> AccuracyReport:
    """Both models over the texts that were held out, and over the questions that they bring."""
    say(f"the checkpoint is complete: {writer.output}; what follows only measures what it costs (--no-report: without)")
    say(f"comparing over {len(texts.held_out)} held-out texts, {sum(map(len, texts.held_out))} tokens")
    original, output = str(source.info.directory), str(writer.output)
    models = LayerwiseModel(original, settings.device), LayerwiseModel(output, settings.device, _kv(settings))
    report = compare(*models, texts.held_out)
    if questions:
        say(f"both models answer {len(questions)} questions")
    report.answers = count_right_answers(
        {"original": (original, "auto"), "quantized": (output, _kv(settings))}, questions, settings.device
    )
    report.save(writer.output, _described(settings, texts))
    return report


def _described(settings: QuantizeSettings, texts: Texts) -> dict[str, Any]:
    """Describes how the checkpoint was made, for the report."""
    return {
        "model": settings.model,
        "manta": VERSION,
        "weights": settings.form,
        "group_size": settings.group_size if settings.form == "w4" else None,
        "awq": settings.awq,
        "kv_scales": settings.kv,
        "calibration_file": (settings.calibration or OWN).name,
        "num_calibration_texts": len(texts.calibration) if settings.calibrates else 0,
    }


def _kv(settings: QuantizeSettings) -> str:
    """The KV cache that the quantized model is for."""
    return "auto" if settings.kv is None else "fp8"
