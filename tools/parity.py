"""Qwen3 and Qwen3-MoE of Hugging Face transformers on the CPU: logits, loss and gradients, document by document.

Run by `make parity` in an environment of its own, which has torch and no jax:

    parity.py FOLDER...

Each FOLDER holds config.json, model.safetensors (float32) and documents.json, a list of lists of token ids. It gets
reference.npz, the numbers in float64 and float32, and saved/, the model as transformers itself saves it. Where FOLDER
has exported/, the same weights as Libra writes them, those are loaded, too: whether each is equal, and their logits,
are in reference.npz. Attention and experts are the plain ("eager") ones. Names of tensors are those of published
checkpoints, each expert's apart.

Transformers computes some things in float32 whatever the type of the model: norms, softmax, rotary positions, loss.
For the float64 numbers its code runs with float32 meaning float64, and an operation that gives float32 all the same
is an error.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, modeling_rope_utils
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

Arrays = dict[str, Any]  # of NumPy
LEAST_GAP = 1e-4
"""Between the last expert chosen and the first one not: rounding must not choose another."""
LEAST_YARN = 0.01
"""What leaving YaRN out must change, as a share of the largest logit: otherwise the comparison says nothing of it."""


class _Wide:
    """The module torch, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _NoFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in tree_leaves(found)):
            raise RuntimeError(f"{func} gave float32 where all was to be float64")
        return found


@contextlib.contextmanager
def float32_is_float64() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (modeling_qwen3, modeling_qwen3_moe, modeling_rope_utils):
            stack.enter_context(mock.patch.object(module, "torch", _Wide()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model in evaluation mode. Its rotary frequencies are worked out as the model's code says while it is made."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == dtype
    return model.eval()


def logits_of(model: Any, documents: list[torch.Tensor]) -> np.ndarray:
    with torch.no_grad():
        return np.concatenate([model(input_ids=ids).logits[0].numpy() for ids in documents])


def by_checkpoint_name(model: Any) -> Arrays:
    """Gradients of all parameters; of the tensors with all experts of a layer, each expert's matrices."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        place, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, both in enumerate(gradient):
                gate, up = np.split(both, 2)
                found |= {f"{place}.{e}.gate_proj.weight": gate, f"{place}.{e}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{place}.{e}.down_proj.weight": down for e, down in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


def numbers(model: Any, documents: list[torch.Tensor]) -> tuple[Arrays, Arrays]:
    """({logits, loss}, with experts also balance_loss and gap; gradients by name).

    logits: (tokens of all documents, vocab). loss: mean over all targets. balance_loss: transformers' own, over the
    tokens of all documents; not part of what the gradients are of. gap: see LEAST_GAP.
    """
    targets = sum(ids.shape[1] - 1 for ids in documents)
    experts = hasattr(model.config, "num_experts")
    logits, routers, loss = [], [], 0.0
    for ids in documents:
        more = {"output_router_logits": True, "router_aux_loss_coef": 0.0} if experts else {}
        out = model(input_ids=ids, use_cache=False, **more)
        part = model.loss_function(out.logits, ids, model.config.vocab_size, num_items_in_batch=targets)
        part.backward()
        loss += part.item()
        logits.append(out.logits[0].detach().numpy())
        if experts:
            routers.append([layer.detach() for layer in out.router_logits])
    found: Arrays = {"logits": np.concatenate(logits), "loss": np.float64(loss)}
    if experts:
        layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
        number, chosen = model.config.num_experts, model.config.num_experts_per_tok
        balance = modeling_qwen3_moe.load_balancing_loss_func(layers, number, chosen)
        ordered = torch.cat(layers).sort(-1, descending=True).values
        found["balance_loss"] = np.float64(balance.item())
        found["gap"] = np.float64((ordered[:, chosen - 1] - ordered[:, chosen]).min().item())
    return found, by_checkpoint_name(model)


def run(folder: Path) -> None:
    documents = [torch.tensor([ids]) for ids in json.loads((folder / "documents.json").read_text())]
    with float32_is_float64():
        wide = load(folder, torch.float64)
        with _NoFloat32():
            exact, exact_gradients = numbers(wide, documents)
    model = load(folder, torch.float32)
    plain, gradients = numbers(model, documents)
    found = {f"float64/{name}": value for name, value in exact.items()}
    found |= {f"float32/{name}": value for name, value in plain.items()}
    found |= {f"float64/gradients/{name}": value for name, value in exact_gradients.items()}
    found |= {f"float32/gradients/{name}": value for name, value in gradients.items()}

    if exact.get("gap", 1) < LEAST_GAP:
        raise SystemExit(f"{folder.name}: two experts are {exact['gap']:.1e} apart for some token, and must be "
                         f"{LEAST_GAP:.0e}: take another seed")  # fmt: skip
    if model.config.rope_parameters["rope_type"] == "yarn":
        config = model.config.to_dict()
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
        other = type(model)(type(model.config).from_dict(config)).eval()
        other.load_state_dict(model.state_dict())
        change = np.abs(logits_of(other, documents) - plain["logits"]).max() / np.abs(plain["logits"]).max()
        if change < LEAST_YARN:
            raise SystemExit(f"{folder.name}: leaving YaRN out changes logits by {change:.1e} of the largest, and must "
                             f"change them by {LEAST_YARN}")  # fmt: skip
        found["change_without_yarn"] = change
    shutil.rmtree(folder / "saved", ignore_errors=True)
    model.save_pretrained(folder / "saved")
    if (folder / "exported").is_dir():
        exported = load(folder / "exported", torch.float32)
        weights, others = model.state_dict(), exported.state_dict()
        equal = weights.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in weights.items())
        found["exported/equal"], found["exported/logits"] = np.array(equal), logits_of(exported, documents)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    np.savez(folder / "reference.npz", versions=np.array(versions), **found)


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for folder in sys.argv[1:]:
        run(Path(folder))


if __name__ == "__main__":
    main()
