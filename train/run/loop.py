"""The run: data, steps, reports, evaluations, checkpoints, in order of time."""

import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from train.config import TrainConfig
from train.data.baselines import baselines
from train.data.evaluation import heldout_batches
from train.data.pipeline import TrainBatches
from train.data.sources import TextSource, load_source
from train.data.tokenizer import ByteTokenizer
from train.run.checkpoint import Checkpoints, differences
from train.run.evaluation import bits_per_byte, sample
from train.run.feed import streams_here, to_devices
from train.run.flops import count_params, mfu, train_flops_per_token
from train.run.mesh import check_divides, make_mesh, start_devices
from train.run.metrics import MetricsWriter, NoWriter, count, duration
from train.run.program import abstract_batch, abstract_state, make_state, make_step
from train.step.optimizer import make_optimizer, num_updates
from train.step.schedule import make_schedule
from train.step.state import TrainState
from train.step.train_step import Metrics

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


class Run:
    """A prepared run. Making one checks everything a person may have typed wrongly (ValueError)
    and builds what training needs; `train` then runs it to the end.

    Of several processes (train.run.processes) each makes the same calls in the same order, feeds
    its own devices and saves what lies there; the first alone writes and speaks."""

    def __init__(self, config: TrainConfig, workdir: str | Path) -> None:
        self.config = config
        self.workdir = Path(workdir).expanduser().absolute()
        if self.workdir.exists() and not self.workdir.is_dir():
            raise ValueError(f"--workdir={workdir} is a file; name a folder, or a new one")
        start_devices(config.mesh)
        dtypes = config.model.dtype, config.model.param_dtype, config.optimizer.mu_dtype
        if "float64" in dtypes and not jax.config.jax_enable_x64:
            raise ValueError("a dtype is float64, which JAX has off; set JAX_ENABLE_X64=1")
        self.tokenizer = ByteTokenizer()
        if config.model.vocab_size < self.tokenizer.vocab_size:
            raise ValueError(
                f"model.vocab_size={config.model.vocab_size} is too small for the tokenizer; "
                f"try {self.tokenizer.vocab_size}"
            )
        self.train_source, self.heldout_source = load_source(config.data)
        self.mesh = make_mesh(config.mesh)
        check_divides(
            self.mesh, config.model, config.data, config.step.accumulation, config.run.eval_context
        )
        self.schedule = make_schedule(config.optimizer, config.run.steps)
        self.optimizer = make_optimizer(config.optimizer, config.run.steps)
        state = abstract_state(config, self.optimizer, self.mesh)
        self.step_fn = make_step(config, self.optimizer, state)
        # A model that cannot run is refused before anything is on disk, and the first step finds
        # the trace.
        with jax.set_mesh(self.mesh):
            self.step_fn.eval_shape(state, abstract_batch(config, self.mesh))
        streams = streams_here(self.mesh, config.data)
        self.batches = TrainBatches(config.data, self.train_source, self.tokenizer, streams=streams)
        self.checkpoints = Checkpoints(
            self.workdir / "checkpoints", keep=config.run.keep_checkpoints
        )
        self.changed: list[str] = []  # fields that differ from the resumed checkpoint's
        self.state, self.resumed_from = self._first_state(state)
        self.interrupted = False

    def _first_state(self, state: TrainState) -> tuple[TrainState, int | None]:
        """The newest checkpoint's state (and data position), or a fresh one."""
        config = dataclasses.asdict(self.config)
        restored = self.checkpoints.restore_latest(state, config)
        if restored is None:
            return make_state(self.config, self.optimizer, state), None
        if restored.step > self.config.run.steps:
            raise ValueError(
                f"{self.workdir} holds step {restored.step}, beyond run.steps="
                f"{self.config.run.steps}; try run.steps={restored.step}, or a new workdir"
            )
        self.changed = [
            f"{path}: {old} -> {new}" for path, old, new in differences(restored.config, config)
        ]
        self.batches.set_state(restored.data_states)
        return restored.state, restored.step

    def train(self) -> None:
        """Runs the remaining steps, then evaluates, samples and prints the closing line."""
        first_step = self.resumed_from or 0
        try:
            self._write_config()
            self.batches.start_prefetch()
            with (
                jax.set_mesh(self.mesh),
                self._writer(first_step) as writer,
            ):
                self._banner(writer)
                with self._stoppable():
                    self._steps(first_step, writer)
                self._finish(writer)
        finally:
            self.close()

    def close(self) -> None:
        """Waits for the last checkpoint and ends the background threads."""
        self.checkpoints.close()
        self.batches.close()

    def _steps(self, first_step: int, writer: MetricsWriter) -> None:
        """The hot loop. Step k's metrics are fetched once step k + 1 is under way, so the devices
        never wait for the host."""
        config, run = self.config, self.config.run
        log = _Log(config, writer, self.schedule, self.state)
        pending: tuple[int, Metrics] | None = None
        for step in range(first_step + 1, run.steps + 1):
            batch = next(self.batches)
            batch = to_devices(self.mesh, batch, self.batches.rows, config.data.batch_size)
            self.state, metrics = self.step_fn(self.state, batch)
            if pending is not None:
                log.step(*pending)
            pending = step, metrics
            last = step == run.steps
            evaluate = run.eval_every and step % run.eval_every == 0 and not last
            due = run.checkpoint_every and step % run.checkpoint_every == 0
            stop = self.interrupted or multihost_utils.reached_preemption_sync_point(step)
            save = last or due or stop
            if evaluate or save:
                log.step(*pending)
                pending = None
            if evaluate:
                start = time.perf_counter()
                bits, _ = self._bits_per_byte(run.eval_rows_during)
                log.evaluation(step, bits, time.perf_counter() - start)
            if save:
                states = self.batches.get_state()
                self.checkpoints.save(step, self.state, states, dataclasses.asdict(config))
            if stop:
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """At Ctrl-C or SIGTERM the step under way ends and is saved; a second Ctrl-C ends the run
        at once. Among several processes JAX takes SIGTERM, and has all agree on a step."""
        signals = [signal.SIGINT]
        if not jax.distributed.is_initialized():
            signals.append(signal.SIGTERM)
        handlers = {number: signal.signal(number, self._interrupt) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _interrupt(self, *_: Any) -> None:
        print("stopping after this step; Ctrl-C again stops without saving", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if jax.distributed.is_initialized():
            signal.raise_signal(signal.SIGTERM)
        else:
            self.interrupted = True

    def _writer(self, first_step: int) -> MetricsWriter:
        if jax.process_index():
            return NoWriter()
        return MetricsWriter(self.workdir, first_step, self.config.run.steps)

    def _bits_per_byte(self, max_rows: int) -> tuple[float, int]:
        """Held-out bits per byte over at most max_rows rows (0: all), and how many bytes that
        is."""
        config = self.config
        num_rows = config.data.batch_size // config.step.accumulation
        batches = heldout_batches(
            self.heldout_source,
            self.tokenizer,
            context_length=config.run.eval_context or config.data.context_length,
            batch_size=num_rows,
            max_rows=max_rows or None,
        )
        return bits_per_byte(
            self.state.params,
            self.state.balance,
            (to_devices(self.mesh, batch, range(num_rows), num_rows) for batch in batches),
            config.model,
            config.step.loss,
        )

    def _finish(self, writer: MetricsWriter) -> None:
        """The sample and the closing line."""
        config = self.config
        bits, num_bytes = self._bits_per_byte(config.run.eval_rows)
        writer.write(config.run.steps, {"heldout_bits_per_byte": bits})
        if config.run.sample_tokens:
            prompt_T = self.tokenizer.encode(self.heldout_source.read(0, 0, 120))
            new_T = sample(
                self.state.params,
                self.state.balance,
                prompt_T,
                config.run.sample_tokens,
                config.model,
                context_length=config.data.context_length,
            )
            writer.say(f"sample, continuing the start of {self.heldout_source.names[0]}:")
            text = self.tokenizer.decode(prompt_T) + "\u2588" + self.tokenizer.decode(new_T)
            writer.say("\n".join("  | " + line for line in text.splitlines()))
        marks = baselines(self.train_source, self.heldout_source)
        all_bytes = sum(self.heldout_source.num_bytes)
        writer.say(
            f"scored {num_bytes:,} of {all_bytes:,} held-out bytes, evenly spread over the files; "
            "the marks in brackets are of all"
        )
        writer.say(
            f"held-out bits per byte: {bits:.3f} (unigram {marks.unigram:.2f}, "
            f"bigram {marks.bigram:.2f}, zlib -9 {marks.zlib:.2f})"
        )

    def _write_config(self) -> None:
        """The resolved config and the library versions, for whoever finds the run folder, and for
        the other processes: a folder of their own would go unnoticed until the first checkpoint."""
        resolved = {
            "config": dataclasses.asdict(self.config),
            "versions": {name: version(name) for name in LIBRARIES},
        }
        text, path = json.dumps(resolved, indent=2) + "\n", self.workdir / "config.json"
        if jax.process_index() == 0:
            self.workdir.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        multihost_utils.sync_global_devices("config.json is written")
        mine = path.is_file() and path.read_text() == text
        if not np.all(multihost_utils.process_allgather(np.bool_(mine))):
            raise ValueError(
                f"not every process finds its own config in {path}; give all the same flags and "
                "versions, and as --workdir one folder that all of them see"
            )

    def _banner(self, writer: MetricsWriter) -> None:
        """What is about to run, where, and where its results go."""
        config, device = self.config, jax.devices()[0]
        counts = count_params(config.model)
        tokens = config.data.batch_size * config.data.context_length
        flops = train_flops_per_token(config.model, config.data.context_length)
        started = "fresh"
        if self.resumed_from is not None:
            started = f"resumed from step {self.resumed_from}"
        rows = (
            (
                "devices",
                f"{jax.device_count()} x {device.device_kind} ({device.platform})"
                + (f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""),
            ),
            ("mesh", ", ".join(f"{k}={v}" for k, v in self.mesh.shape.items())),
            (
                "parameters",
                f"{count(counts.total)}, of which {count(counts.active)} active per token",
            ),
            (
                "tokens per step",
                f"{tokens:,} ({config.data.batch_size} rows of {config.data.context_length}, "
                f"{config.step.accumulation} microbatch(es))",
            ),
            ("training FLOPs", f"{count(flops)} per token"),
            ("corpus", _corpus(self.train_source, self.heldout_source)),
            ("run", f"{config.run.steps:,} steps, {started}"),
            ("outputs", f"{self.workdir} (checkpoints, metrics.jsonl, tensorboard, config.json)"),
        )
        for name, value in (*rows, *(("changed", change) for change in self.changed)):
            writer.say(f"{name:<16} {value}")


def _corpus(train: TextSource, heldout: TextSource) -> str:
    return (
        f"{len(train)} files, {count(sum(train.num_bytes))}B to train on; "
        f"{len(heldout)} files, {count(sum(heldout.num_bytes))}B held out"
    )


class _Log:
    """Console and file lines of the steps, and the watch over steps that were skipped."""

    def __init__(
        self,
        config: TrainConfig,
        writer: MetricsWriter,
        schedule: optax.Schedule,
        state: TrainState,
    ) -> None:
        self.config, self.writer, self.schedule = config, writer, schedule
        self.tokens_per_step = config.data.batch_size * config.data.context_length
        self.flops = train_flops_per_token(config.model, config.data.context_length)
        self.start_time = time.perf_counter()
        # The first step compiles: the clock starts after it.
        self.first_step = self.clock_step = int(state.step) + 1
        self.skipped = int(state.step - num_updates(state.opt_state))
        self.skipped_in_row = 0

    def step(self, step: int, metrics: Metrics) -> None:
        """Takes in a step's metrics, which are fetched here; writes a line when one is due."""
        run = self.config.run
        values: dict[str, Any] = jax.device_get(metrics)
        self.writer.advance()
        self._watch(step, values)
        if step % run.log_every and step not in (run.steps, self.first_step):
            return
        elapsed = time.perf_counter() - self.start_time
        if step == self.first_step:
            self.writer.write(step, values)
            self.writer.say(f"first step, with compilation: {duration(elapsed)}")
            self.start_time = time.perf_counter()
            return
        speed = (step - self.clock_step) * self.tokens_per_step / elapsed
        self.start_time, self.clock_step = time.perf_counter(), step  # of the next interval
        utilisation = mfu(speed, self.flops)
        rate = float(self.schedule(step - 1 - self.skipped))
        values |= {"learning_rate": rate, "tokens_per_second": speed, "skipped": self.skipped}
        if utilisation is not None:
            values["mfu"] = utilisation
        self.writer.write(step, values)
        parts = [
            f"step {step:>{len(str(run.steps))}}/{run.steps}",
            f"loss {values['loss']:.4f}",
            f"lr {rate:.2e}",
            f"{count(speed)} tokens/s",
            f"MFU {'n/a' if utilisation is None else f'{utilisation:.1%}'}",
        ]
        if "max_vio" in values:
            parts.append(f"MaxVio {np.mean(values['max_vio']):.2f}")
        if self.skipped:
            parts.append(f"skipped {self.skipped}")
        left = (run.steps - step) * self.tokens_per_step / speed
        self.writer.say("  ".join([*parts, f"ETA {duration(left)}"]))

    def evaluation(self, step: int, bits: float, seconds: float) -> None:
        """A held-out evaluation; the clock of tokens/s stands still for it."""
        self.start_time += seconds
        self.writer.write(step, {"heldout_bits_per_byte": bits})
        self.writer.say(f"step {step}: held-out bits per byte {bits:.3f}")

    def _watch(self, step: int, values: dict[str, Any]) -> None:
        """Counts skipped steps; too many in a row end the run."""
        if not values["skipped"]:
            self.skipped_in_row = 0
            return
        self.skipped += 1
        self.skipped_in_row += 1
        self.writer.say(
            f"step {step}: loss {values['loss']} or gradient norm {values['grad_norm']} is not "
            f"finite; the update was skipped ({self.skipped_in_row} in a row)"
        )
        if self.skipped_in_row >= self.config.run.max_skipped:
            raise FloatingPointError(
                f"{self.skipped_in_row} steps in a row up to step {step} had a loss or gradient "
                "that was not finite; try a lower optimizer.learning_rate, or start again from an "
                "older checkpoint (run.max_skipped sets the limit)"
            )
