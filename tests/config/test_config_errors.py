"""Every malformed configuration ends in one line that names the key, and soon: as a call and as a command."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxdist.config.load import load_config
from jaxdist.errors import UserError

pytestmark = pytest.mark.xdist_group("commands")  # runs and commands are shared by the tests of this file

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0
MISSING, FOLDER, LOOP, PIPE = "missing", "folder", "loop", "pipe"  # instead of a file's bytes
OK = b"train: {steps: 100}\n"
PROCESSES = ("WORLD_SIZE", "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
CPU = "devices.platform=cpu"  # so that the number of devices is known wherever the tests run


class Case(NamedTuple):
    """`file`: the bytes of the file, or what stands in its place. `texts`: what the message must contain."""

    name: str
    file: bytes | str
    overrides: tuple[str, ...]
    texts: tuple[str, ...]


def case(name: str, file: bytes | str, *texts: str, args: tuple[str, ...] = ()) -> Case:
    return Case(name, file, args, texts)


BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (n, n, *[n - 1] * 9) for n in range(ord("b"), ord("j"))
)

POLICIES = "fp32, bf16, fp16, fp8, fp64, O0, O1, O2, O3"
FILES = [
    case("missing", MISSING, "no such file"),
    case("folder", FOLDER, "a folder"),
    case("unreadable", LOOP, "cannot be read"),
    case("pipe", PIPE, "not a regular file"),
    case("empty", b"", "empty"),
    case("blank", b"  \n\n", "empty"),
    case("bom-only", b"\xef\xbb\xbf", "empty"),
    case("comments", b"# nothing\n  # here\n", "comments only"),
    case("dashes", b"---\n", "empty"),
    case("null", b"null\n", "top level is null", "model, data, mesh"),
    case("top-list", b"- train\n- model\n", "top level is a list", "model, data, mesh"),
    case("top-text", b"train.steps=5\n", "top level is 'train.steps=5'"),
    case("top-number", b"42\n", "top level is 42"),
    case("latin-1", b"train: {sample_prompt: caf\xe9}\n", "UTF-8", "byte offset 26"),
    case("utf-16", "train: {steps: 5}".encode("utf-16"), "UTF-8", "byte offset 0"),
    case("binary", bytes(range(256)) * 8, "UTF-8", "byte offset"),
    case("nul", b"train:\n  steps: 5\x00\n", "line 2, column 11", "U+0000"),
    case("escape-char", b"train: {steps: \x1b[31m5}\n", "line 1, column 16", "U+001B"),
    case("delete-char", b"train: {steps: 5\x7f}\n", "U+007F"),
    case("unclosed-brace", b"train: {steps: 5\n", "not YAML", "line 2, column 1"),
    case("unclosed-quote", b"data: {path: 'abc}\n", "not YAML", "line "),
    case("bad-indent", b"train:\n  steps: 5\n seed: 3\n", "not YAML", "line 3, column 2"),
    case("tab", b"train:\n\tsteps: 5\n", "line 2, column 1", "spaces, not tabs"),
    case("two-colons", b"train: steps: 5\n", "not YAML", "line 1, column 13"),
    case("percent", b"%wrong\ntrain: {steps: 5}\n", "not YAML", "line "),
    case("bad-escape", b'train: {sample_prompt: "\\q"}\n', "not YAML", "line 1"),
    case(
        "duplicate-section", b"train: {steps: 5}\nmodel: {layers: 2}\ntrain: {seed: 1}\n", "line 3", "train", "second"
    ),
    case("list-of-numbers", b"optimizer: {freeze: [embed.*, 3]}\n", "optimizer.freeze[1]: 3 is an integer"),
    case("text-for-a-list", b"optimizer: {freeze: embed.*}\n", "optimizer.freeze: 'embed.*'", "write ['embed.*']"),
    case("remat-mode", b"memory: {remat: sqr}\n", "memory.remat: 'sqr'", "none, full, dots, sqrt, offload", "'sqrt'"),
    case("remat-name", b"memory: {remat: [mlp.hiden]}\n", "memory.remat[0]: 'mlp.hiden'", "did you mean 'mlp.hidden'"),
    case("remat-no-list", b"memory: {remat: mlp.out}\n", "memory.remat: 'mlp.out'", "write [mlp.out]"),
    case("remat-number", b"memory: {remat: 2}\n", "memory.remat: 2 is an integer", "none, full, dots"),
    case("negative-chunk", b"model: {loss_chunk: -1}\n", "model.loss_chunk: -1", ">= 0"),
    case("mapping-for-a-list", b"optimizer: {freeze: {a: b}}\n", "optimizer.freeze: a mapping", "a list of texts"),
    case("star", b"optimizer: {freeze: [*.bias]}\n", "not YAML", "put text that begins with * in quotes"),
    case("dollar", b"data: {path: ${HOME}/txt}\n", "not YAML", "${...} is not expanded, write the value itself"),
    case("bad-character", b'train: {sample_prompt: "\\UFFFFFFFF"}\n', "not YAML"),
    case("bad-version", b"%YAML 1." + b"1" * 5000 + b"\n---\n" + OK, "not YAML"),
    case("duplicate-key", b"train:\n  steps: 5\n  steps: 6\n", "line 3", "train.steps", "second"),
    case("bomb", BOMB, "&anchor and *alias"),
    case("alias", b"train: {steps: &n 5, seed: *n}\n", "train.steps", "&anchor"),
    case("self-alias", b"train: &t {steps: *t}\n", "train", "&anchor"),
    case("alias-alone", b"train: *t\n", "train", "*alias"),
    case("python-tag", b"train: !!python/object/apply:os.system ['touch /tmp/x']\n", "train", "tag", "python/object"),
    case("python-name", b"data: {path: !!python/name:os.system }\n", "data.path", "tag"),
    case("own-tag", b"train: {steps: !env STEPS}\n", "train.steps", "tag", "!env"),
    case("str-tag", b"train: {steps: !!str 5}\n", "train.steps", "tag"),
    case("key-tag", b"? !!python/tuple [1, 2]\n: 3\n", "a key is"),
    case("list-key", b"train: {[1, 2]: 3}\n", "in train", "a key is"),
    case("two-documents", b"train: {steps: 5}\n---\nmodel: {layers: 2}\n", "line 2", "second document"),
    case("env", b"data: {path: '${oc.env:SECRET}'}\n", "data.path", "not expanded"),
    case("interpolation", b"train: {steps: '${data.seq_len}'}\n", "train.steps", "an integer", "not expanded"),
    case("huge", b"# " + b"x" * 2**21 + b"\n" + OK, "larger than 65536 bytes"),
    case("deep-flow", b"train: " + b"[" * 20000 + b"]" * 20000, "nested more than 16"),
    case("deep-map", b"train: " + b"{a: " * 10000 + b"1" + b"}" * 10000, "nested more than 16"),
    case("deep-block", b"".join(b" " * n + b"a:\n" for n in range(300)), "nested more than 16"),
    case("dotted-in-file", b"train.steps: 5\n", "train.steps", "train: {steps: ...}"),
    case("merge-key", b"train: {<<: {steps: 5}}\n", "train.<<", "unknown key"),
]

KEYS = [
    case("schedule-1f1b", b"parallel: {schedule: 1F1B}\n", "parallel.schedule", "did you mean 'one_f_one_b'?"),
    case("strategy-1f1b", b"parallel: {strategy: 1f1b}\n", "did you mean parallel.schedule=one_f_one_b?"),
    case("strategy-gpipe", b"parallel: {strategy: gpipe}\n", "did you mean parallel.schedule=gpipe?"),
    case("schedule-zero3", b"parallel: {schedule: zero3}\n", "did you mean parallel.strategy=zero3?"),
    case("section-typo", b"trian: {steps: 5}\n", "trian", "unknown section", "did you mean train?"),
    case("section-case", b"Model: {layers: 5}\n", "Model", "did you mean model?"),
    case("key-typo", b"train: {stpes: 5}\n", "train.stpes", "value 5", "mean train.steps?", "keys of train: steps"),
    case("key-typo-mesh", b"mesh: {fdsp: 2}\n", "mesh.fdsp", "did you mean mesh.fsdp?"),
    case(
        "key-nested-typo",
        b"parallel: {grad_sync: {algoritm: ring}}\n",
        "parallel.grad_sync.algoritm",
        "did you mean parallel.grad_sync.algorithm?",
    ),
    case("key-elsewhere", b"model: {lr: 1e-3}\n", "model.lr", "did you mean optimizer.lr?"),
    case("key-on-top", b"lr: 1e-3\n", "lr", "did you mean optimizer.lr?"),
    case("key-other-name", b"data: {batch_size: 8}\n", "data.batch_size", "did you mean data.global_batch?"),
    case("key-other-section", b"train: {learning_rate: 8}\n", "train.learning_rate", "did you mean optimizer.lr?"),
    case("key-dp", b"mesh: {dp: 8}\n", "mesh.dp", "did you mean mesh.data?"),
    case("key-number", b"3: {steps: 5}\n", "3", "unknown section"),
    case("key-empty", b"? \n: 3\n", "unknown section"),
    case("no-space", b"train:\n  steps:100\n", "train", "a space follows the colon"),
    case("section-null", b"train:\nmodel: {layers: 2}\n", "train", "nothing (null)", "train.steps=200"),
    case("section-list", b"mesh:\n- data: 2\n", "mesh", "a list", "mesh.pipe=1"),
    case("section-number", b"mesh: 8\n", "mesh", "8", "keys of mesh: pipe, data"),
    case("section-nested", b"parallel: {grad_sync: ring}\n", "parallel.grad_sync", "'ring'", "grad_sync.algorithm="),
    case("section-key", b"train: {steps: {every: 5}}\n", "train.steps", "a mapping", "an integer >= 1"),
]

TYPES = [
    case("int-null", b"train:\n  steps:\n", "train.steps", "null", "an integer >= 1"),
    case("int-bool", b"train: {steps: true}\n", "train.steps", "true is a boolean", "an integer >= 1"),
    case("int-float", b"train: {steps: 100.0}\n", "train.steps", "100.0", "an integer >= 1", "write 100"),
    case("int-exponent", b"train: {steps: 1e3}\n", "train.steps", "write 1000"),
    case("int-text", b"train: {steps: many}\n", "train.steps", "'many' is text", "an integer >= 1"),
    case("int-quoted", b"train: {steps: '100'}\n", "train.steps", "'100'", "without quotes"),
    case("int-list", b"train: {steps: [100]}\n", "train.steps", "a list"),
    case("int-date", b"train: {steps: 2020-01-01}\n", "train.steps", "'2020-01-01'"),
    case("int-clock", b"train: {steps: 1:30}\n", "train.steps", "'1:30'"),
    case("int-octal", b"train: {seed: 010}\n", "train.seed", "'010'", "leading zeros"),
    case("int-mesh", b"mesh: {data: 2.0}\n", "mesh.data", "2.0", "write 2"),
    case("int-nan", b"train: {steps: .nan}\n", "train.steps", "nan", "an integer"),
    case("int-optional-text", b"model: {kv_heads: none}\n", "model.kv_heads", "'none'", "or null"),
    case("float-quoted", b"optimizer: {lr: '1e-3'}\n", "optimizer.lr", "'1e-3'", "without quotes"),
    case("float-null", b"optimizer: {lr: }\n", "optimizer.lr", "null", "a number > 0"),
    case("float-bool", b"optimizer: {lr: yes}\n", "optimizer.lr", "true is a boolean", "a number > 0"),
    case("float-list", b"optimizer: {lr: [1e-3, 1e-4]}\n", "optimizer.lr", "a list", "a number > 0"),
    case("float-map", b"optimizer: {lr: {peak: 1}}\n", "optimizer.lr", "a mapping", "a number > 0"),
    case("float-inf", b"optimizer: {lr: .inf}\n", "optimizer.lr", "inf", "finite"),
    case("float-nan", b"optimizer: {weight_decay: .NaN}\n", "optimizer.weight_decay", "nan", "finite"),
    case("float-overflow", b"optimizer: {lr: 1e999}\n", "optimizer.lr", "finite"),
    case("float-huge-int", b"optimizer: {lr: 1%s}\n" % (b"0" * 400), "optimizer.lr", "401 digits"),
    case("float-comma", b"optimizer:\n  lr: 0,001\n", "optimizer.lr", "'0,001'"),
    case("bool-int", b"model: {tied: 1}\n", "model.tied", "1 is an integer", "true or false"),
    case("bool-text", b"observe: {report: 'true'}\n", "observe.report", "'true'", "without quotes"),
    case("bool-null", b"observe: {report: null}\n", "observe.report", "null", "true or false"),
    case("bool-list", b"observe: {report: []}\n", "observe.report", "a list", "true or false"),
    case("text-bool", b"data: {path: no}\n", "data.path", "false is a boolean", "quotes"),
    case("text-int", b"train: {sample_prompt: 5}\n", "train.sample_prompt", "5", "quotes"),
    case("text-null", b"train: {sample_prompt: }\n", "train.sample_prompt", "null"),
    case("text-list", b"data: {path: [a, b]}\n", "data.path", "a list"),
    case("text-nul", b'data: {path: "a\\0b"}\n', "data.path", "U+0000"),
    case("text-surrogate", b'train: {sample_prompt: "\\ud800"}\n', "train.sample_prompt", "U+D800"),
    case("choice-bool", b"devices: {platform: off}\n", "devices.platform", "false", "auto, cpu, gpu"),
]

VALUES = [
    case("zero-steps", b"train: {steps: 0}\n", "train.steps", "0", ">= 1"),
    case("negative-seed", b"train: {seed: -1}\n", "train.seed", "-1", ">= 0"),
    case("large-seed", b"train: {seed: 2147483648}\n", "train.seed", "2147483648", "2147483647"),
    case("huge-int", b"train: {steps: %s}\n" % (b"9" * 5000), "train.steps", "5000 digits"),
    case("big-int", b"train: {steps: %s}\n" % (b"9" * 900), "train.steps", "digits", ">= 1"),
    case("zero-lr", b"optimizer: {lr: 0}\n", "optimizer.lr", "0", "> 0"),
    case("dropout-one", b"model: {dropout: 1.0}\n", "model.dropout", "1.0", ">= 0 and < 1"),
    case("held-out", b"data: {held_out: 0.6}\n", "data.held_out", "0.6", "> 0 and <= 0.5"),
    case("mesh-zero", b"mesh: {data: 0}\n", "mesh.data", "0", ">= 1, or -1"),
    case("mesh-minus-two", b"mesh: {data: -2}\n", "mesh.data", "-2", ">= 1, or -1"),
    case("simulated", b"devices: {simulated: 513}\n", "devices.simulated", "513", "<= 512"),
    case("bucket", b"parallel: {grad_sync: {bucket_mb: 0}}\n", "parallel.grad_sync.bucket_mb", "0", "> 0"),
    case(
        "choice-typo", b"optimizer: {name: adamww}\n", "optimizer.name", "'adamww'", "adamw, sgd, lion", "mean 'adamw'?"
    ),
    case("choice-optional", b"model: {positions: ropes}\n", "model.positions", "learned, rope", "mean 'rope'?"),
    case("precision-short", b"precision: bf61\n", "precision.policy", "'bf61'", POLICIES, "mean 'bf16'?"),
    case("precision-long", b"precision: bfloat16\n", "precision.policy", "mean 'bf16'?"),
    case("precision-level", b"precision: o4\n", "precision.policy", "'o4'", POLICIES),
    case("precision-fp4", b"precision: fp4\n", "precision.policy", "'fp4'", POLICIES),
    case("precision-half", b"precision: {policy: O2, half: float8}\n", "precision.half", "'float8'", "bfloat16"),
    case("precision-keep", b"precision: {policy: O2, keep_fp32: head}\n", "precision.keep_fp32", "write ['head']"),
    case("precision-number", b"precision: 16\n", "precision", "16", "precision.policy"),
    case("precision-list", b"precision: [bf16]\n", "precision", "a list", "precision.policy"),
    case("reduce-dtype", b"precision: {reduce_dtype: float23}\n", "precision.reduce_dtype", "mean 'float32'?"),
    case("source", b"data: {source: txt}\n", "data.source", "'txt'", "text, tokens", "mean 'text'?"),
    case("model-name", b"model: {name: gpt2}\n", "model.name", "'gpt2'", "mean 'gpt'?"),
    case("model-dotted", b"model: {name: my_package.my_model}\n", "model.name", "my_package"),
    case("model-path", b"model: {name: ./models/own.py}\n", "model.name", "dotted path"),
    case("model-dots", b"model: {name: ...}\n", "model.name", "dotted path"),
    case("strategy", b"parallel: {strategy: zero33}\n", "parallel.strategy", "ddp", "mean 'zero3'?"),
    case("strategy-fsdp", b"parallel: {strategy: fsdp}\n", "parallel.strategy", "mean 'zero3'?"),
    case("schedule", b"parallel: {schedule: acumulate}\n", "parallel.schedule", "mean 'accumulate'?"),
    case("algorithm", b"parallel: {grad_sync: {algorithm: rings}}\n", "parallel.grad_sync.algorithm", "mean 'ring'?"),
    case("text-path", b"data: {path: /no/such/folder}\n", "data.path", "/no/such/folder", "does not exist"),
    case("text-home", b"data: {path: ~/no-such-folder}\n", "data.path", "~/no-such-folder", "does not exist"),
    case("text-user", b"data: {path: ~no-such-user/folder}\n", "data.path", "~no-such-user"),
    case("text-empty", b"data: {path: ''}\n", "data.path", "does not exist"),
    case("text-long", b"data: {path: %s}\n" % (b"x" * 5000), "data.path", "name too long"),
    case("model-long", b"model: {from: %s}\n" % (b"x" * 5000), "model.from", "name too long"),
    case("model-deep", b"model: {from: %s}\n" % (b"x/" * 2045), "model.from", "name too long"),
    case("model-user", b"model: {from: ~no-such-user/folder}\n", "model.from", "~no-such-user"),
    case("init-long", b"init: {from: %s}\ndata: {source: jsonl, path: .}\n" % (b"x" * 300), "init.from", "too long"),
    case("tokens-path", b"data: {source: tokens}\n", "data.path", "'stdlib'", "train.bin"),
    case("text-val", b"data: {val_path: /tmp}\n", "data.val_path", "'/tmp' is not read by data.source text"),
    case("tokens-val", b"data: {source: tokens, path: ., val_path: no.bin}\n", "data.val_path", "no.bin"),
]

TOGETHER = [
    case(
        "sqrt-and-prefetch",
        b"memory: {remat: sqrt}\n",
        "memory.remat: 'sqrt'",
        "parallel.prefetch=0",
        args=("parallel.prefetch=1",),
    ),
    case(
        "remat-and-same-bits",
        b"memory: {remat: full}\n",
        "memory.remat: 'full'",
        "allowed: none",
        args=("parallel.grad_sync.deterministic=true",),
    ),
    case(
        "sqrt-in-halves",
        b"memory: {remat: sqrt}\n",
        "memory.remat: 'sqrt'",
        "zero_bubble",
        args=("parallel.schedule=zero_bubble",),
    ),
    case(
        "offload-in-stages",
        b"memory: {remat: offload}\n",
        "memory.remat: 'offload'",
        "gpipe has several",
        args=("parallel.schedule=gpipe",),
    ),
    case("heads", b"model: {heads: 5}\n", "model.heads", "5", "model.width 128", "1, 2, 4, 8"),
    case("kv-heads", b"model: {heads: 4, kv_heads: 3}\n", "model.kv_heads", "3", "1, 2, 4"),
    case("kv-heads-more", b"model: {heads: 4, kv_heads: 8}\n", "model.kv_heads", "8", "1, 2, 4"),
    case("rope-odd", b"model: {style: llama, width: 12, heads: 4}\n", "model.heads", "odd width 3", "1, 2, 3, 6"),
    case("tensor-heads", b"model: {heads: 4}\nmesh: {tensor: 8}\n", "mesh.tensor", "8", "heads 4", "1, 2, 4", "8, 16"),
    case("tensor-kv", b"model: {heads: 4, kv_heads: 1}\nmesh: {tensor: 2}\n", "mesh.tensor", "kv_heads 1", "2, 4"),
    case("tensor-vocab", b"model: {vocab: 255}\nmesh: {tensor: 2}\n", "mesh.tensor", "model.vocab 255", "254, 256"),
    case("tensor-mlp", b"model: {mlp_width: 33}\nmesh: {tensor: 2}\n", "mesh.tensor", "model.mlp_width 33", "32, 34"),
    case("batch", b"data: {global_batch: 30}\nmesh: {data: 4}\n", "data.global_batch", "30", "28, 32", args=(CPU,)),
    case(
        "microbatches",
        b"parallel: {microbatches: 3}\nmesh: {data: 2}\n",
        "data.global_batch",
        "30, 36",
        "1, 2, 4, 8",
        args=(CPU,),
    ),
    case("pipe-accumulate", b"model: {layers: 4}\nmesh: {pipe: 2}\n", "mesh.pipe", "accumulate", "one_f_one_b"),
    case(
        "pipe-layers",
        b"model: {layers: 6}\nmesh: {pipe: 4}\nparallel: {schedule: gpipe}\n",
        "mesh.pipe",
        "2, 3",
        "parallel.stages=[1,2,2,1]",
    ),
    case("pipe-layers-few", b"model: {layers: 3}\nmesh: {pipe: 4}\nparallel: {schedule: gpipe}\n", "mesh.pipe", "1, 3"),
    case(
        "stages-sum",
        b"model: {layers: 6}\nmesh: {pipe: 2}\nparallel: {schedule: gpipe, stages: [2, 3]}\n",
        "parallel.stages",
        "[2, 3]",
        "5 blocks",
        "6 in all",
        "[3,3]",
    ),
    case(
        "stages-count",
        b"mesh: {pipe: 2}\nparallel: {schedule: gpipe, stages: [1, 2, 1]}\n",
        "parallel.stages",
        "3 sizes",
        "2 sizes (mesh.pipe 2)",
        "4 in all",
        "[2,2]",
    ),
    case("stages-alone", b"parallel: {stages: [1, 3]}\n", "parallel.stages", "2 sizes", "1 sizes (mesh.pipe 1)"),
    case(
        "stages-chunks",
        b"mesh: {pipe: 2}\nparallel: {chunks: 2, schedule: interleaved, microbatches: 2, stages: [1, 3]}\n",
        "parallel.stages",
        "4 sizes (mesh.pipe 2 x parallel.chunks 2)",
        "[1,1,1,1]",
    ),
    case("stages-zero", b"parallel: {stages: [4, 0]}\n", "parallel.stages[1]", "0", ">= 1"),
    case("stages-text", b"parallel: {stages: [4, x]}\n", "parallel.stages[1]", "'x'", "an integer"),
    case("stages-number", b"parallel: {stages: 4}\n", "parallel.stages", "a list of integers", "[4]"),
    case("pipe-prefetch", b"parallel: {prefetch: 1, schedule: gpipe}\n", "parallel.prefetch", "gpipe", "0"),
    case("chunks", b"parallel: {chunks: 2, schedule: gpipe}\n", "parallel.chunks", "gpipe", "interleaved"),
    case(
        "chunks-layers",
        b"model: {layers: 8}\nmesh: {pipe: 2}\nparallel: {chunks: 3, schedule: interleaved}\n",
        "parallel.chunks",
        "4 blocks",
        "2, 4",
        "parallel.stages=[1,1,2,2,1,1]",
    ),
    case(
        "chunks-microbatches",
        b"model: {layers: 8}\nmesh: {pipe: 2}\nparallel: {chunks: 2, schedule: interleaved, microbatches: 3}\n",
        "parallel.microbatches",
        "2, 4",
    ),
    case(
        "sequence-parallel",
        b"parallel: {sequence_parallel: true}\ndata: {seq_len: 130}\nmesh: {tensor: 4}\n",
        "data.seq_len",
        "130",
        "128, 132",
        "parallel.sequence_parallel=false",
    ),
    case(
        "sequence-parallel-sqrt",
        b"parallel: {sequence_parallel: true}\nmemory: {remat: sqrt}\n",
        "memory.remat: 'sqrt'",
        "parallel.sequence_parallel",
        "none, full, dots",
    ),
    case(
        "collective-matmul-alone",
        b"parallel: {collective_matmul: true}\n",
        "parallel.collective_matmul: true",
        "parallel.sequence_parallel, which is false",
        "allowed: false",
        "parallel.sequence_parallel=true",
    ),
    case(
        "collective-matmul-fp8",
        b"parallel: {sequence_parallel: true, collective_matmul: true}\nprecision: fp8\n",
        "parallel.collective_matmul: true",
        "precision.policy 'fp8'",
        "precision.policy=bf16",
    ),
    case(
        "collective-matmul-pipe",
        b"parallel: {sequence_parallel: true, collective_matmul: true, schedule: gpipe}\nmesh: {pipe: 2}\n",
        "parallel.collective_matmul: true",
        "parallel.pipeline_cond=false",
    ),
    case(
        "collective-matmul-per-op",
        b"parallel: {sequence_parallel: true, collective_matmul: true}\nprecision: O1\n",
        "parallel.collective_matmul: true",
        "precision.per_op",
        "precision.policy=O2",
    ),
    case(
        "batch-split-prefetch",
        b"parallel: {batch_split: 2, prefetch: 1}\n",
        "parallel.batch_split: 2",
        "parallel.prefetch: 1",
        "parallel.prefetch=0",
    ),
    case(
        "batch-split-deterministic",
        b"parallel: {batch_split: 2, grad_sync: {deterministic: true}}\n",
        "parallel.batch_split: 2",
        "allowed: 1",
        "parallel.grad_sync.deterministic=false",
    ),
    case(
        "batch-split-sums",
        b"parallel: {batch_split: 2}\nmesh: {tensor: 2}\n",
        "parallel.batch_split: 2",
        "mesh.tensor 2",
        "parallel.sequence_parallel=true",
    ),
    case(
        "batch-split-rows",
        b"parallel: {batch_split: 2}\nmesh: {data: 4}\ndata: {global_batch: 12}\n",
        "data.global_batch: 12",
        "batch_split 2",
        "nearest batch sizes that work: 8, 16",
    ),
    case(
        "scan-blocks-prefetch",
        b"model: {scan_blocks: 2}\nparallel: {prefetch: 1}\n",
        "model.scan_blocks: 2",
        "parallel.prefetch 1",
        "allowed with it: 1",
    ),
    case("prefetch", b"parallel: {prefetch: 2}\n", "parallel.prefetch", "2", "1"),
    case(
        "prefetch-kept",
        b"parallel: {prefetch: 1, reshard_after_forward: false}\n",
        "parallel.prefetch",
        "parallel.reshard_after_forward to true",
    ),
    case("precision-64", b"precision: {compute_dtype: float64}\n", "precision.compute_dtype", "policy fp64"),
    case("half-of-none", b"precision: {policy: bf16, half: float16}\n", "precision.half", "fp16, O1, O2, O3"),
    case("pure-half-eps", b"precision: O3\n", "optimizer.eps", "1e-08", "1e-4", "param_dtype=float32"),
    case("pure-half-muon", b"precision: O3\noptimizer: {name: muon}\n", "optimizer.name", "'muon'", "sgd"),
    case(
        "half-ordered",
        b"precision: {policy: O3, half: bfloat16}\nparallel: {grad_sync: {deterministic: true}}\n",
        "precision.policy",
        "reduce_dtype=float32",
    ),
    case(
        "fp16-ordered",
        b"precision: {reduce_dtype: float16}\nparallel: {grad_sync: {deterministic: true}}\n",
        "precision.reduce_dtype",
        "float32",
    ),
    case(
        "prefetch-ordered",
        b"parallel: {prefetch: 1, grad_sync: {deterministic: true}}\n",
        "parallel.prefetch",
        "parallel.grad_sync.deterministic",
    ),
    case("batch-small", b"data: {global_batch: 2}\nmesh: {data: 8}\n", "data.global_batch", "2", "8", args=(CPU,)),
    case("two-rests", b"mesh: {data: -1, fsdp: -1}\n", "mesh", "data=-1 and fsdp=-1"),
    case("rest-ragged", b"mesh: {data: -1, tensor: 3}\n", "mesh.data", "-1", "8 devices / 3", "tensor=2", args=(CPU,)),
    case(
        "mesh-too-large",
        b"mesh: {data: 4, fsdp: 4}\n",
        "mesh",
        "16 devices",
        "8 are",
        "data=2 fsdp=4",
        "devices.simulated=16",
        args=(CPU,),
    ),
    case(
        "mesh-enormous",
        b"mesh: {data: 2000000000, fsdp: 2000000000, tensor: 2000000000}\n",
        "mesh",
        "8 are there",
        args=(CPU,),
    ),
    case("mesh-pipe", b"mesh: {pipe: 2}\n", "mesh.pipe", "2", "accumulate", "one stage"),
    case("context", b"mesh: {context: 2}\nmodel: {name: bert}\n", "mesh.context", "2", "no attention of model bert"),
    case("context-length", b"mesh: {context: 2}\ndata: {seq_len: 130}\n", "data.seq_len", "130", "divisible by 4"),
    case("expert", b"mesh: {expert: 2}\n", "mesh.expert", "2", "no layer of model gpt"),
]

OVERRIDES = [
    case("o-no-equals", OK, "'train.steps'", "section.key=value", args=("train.steps",)),
    case("o-spaced", OK, "'train.steps'", "section.key=value", args=("train.steps", "=", "5")),
    case("o-no-key", OK, "'=5'", "section.key=value", args=("=5",)),
    case("o-empty-part", OK, "'train..steps=5'", "section.key=value", args=("train..steps=5",)),
    case("o-empty-end", OK, "'train.=5'", "section.key=value", args=("train.=5",)),
    case("o-blank", OK, "section.key=value", args=("",)),
    case("o-typo", OK, "train.stpes", "'5'", "did you mean train.steps?", args=("train.stpes=5",)),
    case("o-section-typo", OK, "mehs", "did you mean mesh?", args=("mehs.data=2",)),
    case("o-bare-key", OK, "steps", "did you mean train.steps or observe.profile.steps?", args=("steps=5",)),
    case("o-below-value", OK, "train.steps.max", "train.steps is one value", args=("train.steps.max=5",)),
    case("o-section", OK, "mesh", "8", "mesh.pipe=1", args=("mesh=8",)),
    case("o-section-null", OK, "mesh", "nothing (null)", args=("mesh=",)),
    case("o-section-key", OK, "mesh.dta", "did you mean mesh.data?", args=("mesh={dta: 8}",)),
    case("o-null", OK, "train.steps", "null", args=("train.steps=",)),
    case("o-text", OK, "train.steps", "'ten'", args=("train.steps=ten",)),
    case("o-two-equals", OK, "train.steps", "'=5'", args=("train.steps==5",)),
    case("o-choice", OK, "parallel.strategy", "mean 'zero3'?", args=("parallel.strategy=Zero3",)),
    case("o-shorthand", OK, "precision.policy", "mean 'bf16'?", args=("precision=BF16",)),
    case("o-yaml", OK, "train.steps", "not YAML", args=("train.steps=[1",)),
    case("o-tag", OK, "train.steps", "tag", args=("train.steps=!!python/name:os.system",)),
    case("o-alias", OK, "train.steps", "alias", args=("train.steps=*a",)),
    case("o-deep", OK, "train.steps", "nested", args=("train.steps=" + "[" * 5000,)),
    case("o-env", OK, "data.path", "not expanded", args=("data.path=${oc.env:HOME}",)),
    case("o-inf", OK, "optimizer.lr", "finite", args=("optimizer.lr=.inf",)),
    case("o-range", OK, "optimizer.b1", "1.5", "< 1", args=("optimizer.b1=1.5",)),
    case("o-control", OK, "U+001B", args=("train.sample_prompt=\x1b[31m",)),
    case("o-file-still-wrong", b"train: {steps: 0}\n", "train.steps", "0", args=("train.steps=5",)),
    case(
        "o-typo-no-yaml",
        OK,
        "train.sample_promt",
        "did you mean train.sample_prompt?",
        args=("train.sample_promt=@you",),
    ),
]

CASES = [*FILES, *KEYS, *TYPES, *VALUES, *TOGETHER, *OVERRIDES]


def place(each: Case, folder: Path) -> Path:
    """Put the file of a case, or what stands in its place, into a folder of its own."""
    path = folder / "config.yaml"
    if isinstance(each.file, bytes):
        path.write_bytes(each.file)
    elif each.file == FOLDER:
        path.mkdir()
    elif each.file == LOOP:
        path.symlink_to(path)
    elif each.file == PIPE:
        os.mkfifo(path)
    return path


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROCESSES:
        monkeypatch.delenv(name, raising=False)


def test_names_are_unique() -> None:
    assert len({each.name for each in CASES}) == len(CASES) >= 70


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_call(each: Case, tmp_path: Path) -> None:
    path = place(each, tmp_path)
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        load_config(path, each.overrides)
    assert time.perf_counter() - start < LIMIT_S
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and message.isprintable() and len(message) < 1000
    assert [text for text in each.texts if text not in message] == [], message


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str
    seconds: float


def command(each: Case, path: Path) -> Ended:
    """The case as a command, in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in PROCESSES}
    line = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(path), *each.overrides]
    start = time.perf_counter()
    done = subprocess.run(
        line, env=env | {"PYTHONPATH": str(ROOT)}, cwd=path.parent, capture_output=True, text=True, timeout=60
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """How the chosen cases end as commands; two at a time, so that starting processes is what takes the time."""
    tests = [item for item in request.session.items if item.originalname == test_command.__name__]
    cases = [test.callspec.params["each"] for test in tests]
    paths = [place(each, tmp_path_factory.mktemp("command")) for each in cases]
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip((each.name for each in cases), pool.map(command, cases, paths), strict=True))
    for each, path in zip(cases, paths, strict=True):
        if results[each.name].seconds >= LIMIT_S:  # perhaps the machine was busy: once more, alone
            results[each.name] = command(each, path)
    yield results


def level(i: int) -> list[pytest.MarkDecorator]:
    """A command says what the call says, and `test_call` makes every one of these calls."""
    return [] if i % 16 == 0 else [pytest.mark.slow if i % 4 == 0 else pytest.mark.exhaustive]


@pytest.mark.parametrize("each", [pytest.param(each, id=each.name, marks=level(i)) for i, each in enumerate(CASES)])
def test_command(each: Case, ended: dict[str, Ended]) -> None:
    result = ended[each.name]
    assert result.status == 2, result
    assert len(result.stderr.splitlines()) == 1 and result.stderr.endswith("\n"), result.stderr
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert [text for text in each.texts if text not in result.stderr] == [], result.stderr
    assert result.stdout == ""
    assert result.seconds < LIMIT_S, result


@pytest.mark.parametrize("name", ["WORLD_SIZE", "JAX_NUM_PROCESSES"])
@pytest.mark.parametrize("value", ["two", "0", "-1", "2.0", "9" * 5000, " "])
def test_process_count(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv({"WORLD_SIZE": "MASTER_ADDR", "JAX_NUM_PROCESSES": "JAX_COORDINATOR_ADDRESS"}[name], "localhost")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{name}: .*process count"):
        load_config(place(case("", OK), tmp_path), [CPU])


def test_gpu_without_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.config.resolve.GPU_PLUGINS", ())
    with pytest.raises(UserError, match=r"devices\.platform: 'gpu'.*pip install 'jaxdist\[cuda13\]'"):
        load_config(place(case("", OK), tmp_path), ["devices.platform=gpu"])


def test_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "tiny_cpu.yaml").write_bytes(OK)
    with pytest.raises(UserError, match="did you mean .*tiny_cpu.yaml"):
        load_config(tmp_path / "tiny_cpuu.yaml")


def test_nothing_runs(tmp_path: Path) -> None:
    """A tag that would run a command does not."""
    mark = tmp_path / "mark"
    file = f"train: !!python/object/apply:os.system ['touch {mark}']\n".encode()
    with pytest.raises(UserError):
        load_config(place(case("", file), tmp_path))
    assert not mark.exists()
