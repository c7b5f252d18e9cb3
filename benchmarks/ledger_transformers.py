"""One process that loads a checkpoint with transformers, answers a full batch, and says what it held."""

import time
from typing import Any

from benchmarks.ledger_job import Held, LedgerJob, Meter, begin, end

_ANSWER = 8  # tokens
_FILLER = 100
_PATCHES = 4  # of an image token
_PATCH_VALUES = 1536  # 3 channels, 2 frames, 16 x 16 pixels


def main() -> None:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    from vlfit.tuning.calibration_run import workspace_bytes

    job = begin()
    started = time.perf_counter()
    meter = Meter()
    torch.empty(1, device=job.device)
    torch.cuda.synchronize()
    bare = meter.process() - torch.cuda.memory_reserved()
    workspace = workspace_bytes(torch.device(job.device))
    ready = time.perf_counter()
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(job.folder, dtype=torch.bfloat16)
    model = model.to(job.device).eval()
    torch.cuda.synchronize()
    loaded, reserved_loaded = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    at_load = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    inputs = batch(job, model.config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    output = model.generate(**inputs, max_new_tokens=_ANSWER, do_sample=False)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    end(
        Held(
            process=meter.process(),
            own=meter.own(),
            reserved=torch.cuda.memory_reserved(),
            reserved_loaded=reserved_loaded,
            peak=torch.cuda.max_memory_allocated(),
            loaded=loaded,
            bare_context=bare,
            workspace=workspace,
            lines=lines_of(model),
            reached={
                "max_length": int(output.shape[1]),
                "image_tokens": job.image_tokens,
                "sequences": len(output),
            },
            seconds={"start": ready - started, "load": at_load - ready, "run": ended - at_load},
        )
    )


def batch(job: LedgerJob, config: Any) -> dict[str, Any]:
    """Prompts that leave room for the answer, each with one picture, as the processor would make them."""
    import torch

    rows = next(rows for rows in range(int(job.image_tokens**0.5), 0, -1) if job.image_tokens % rows == 0)
    columns = job.image_tokens // rows
    length = job.context - _ANSWER
    prompt = torch.full((length,), _FILLER)
    prompt[0] = config.vision_start_token_id
    prompt[1 : 1 + job.image_tokens] = config.image_token_id
    prompt[1 + job.image_tokens] = config.vision_end_token_id
    ids = prompt.repeat(job.sequences, 1).to(job.device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.zeros(job.sequences * job.image_tokens * _PATCHES, _PATCH_VALUES).to(
            job.device
        ),
        "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]] * job.sequences).to(job.device),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def lines_of(model: Any) -> dict[str, int]:
    """Bytes of the parameters by the ledger's lines; the KV cache comes and goes, so torch cannot tell it."""
    sizes = {"weights.text": 0, "weights.vision": 0, "weights.embedding": 0}
    for name, parameter in model.named_parameters():
        vocabulary = "embed_tokens" in name or "lm_head" in name
        line = "vision" if ".visual." in f".{name}" else "embedding" if vocabulary else "text"
        sizes[f"weights.{line}"] += parameter.nbytes
    return sizes


if __name__ == "__main__":
    main()
