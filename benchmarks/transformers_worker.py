"""One process that answers with Hugging Face transformers' ``generate``: the reference.

The processor is put together by hand, because transformers' own wants torchvision for videos. It does the
same steps: decode, resize, patchify, render the template, repeat the placeholder, tokenize.
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Job,
    RequestPhases,
    Run,
    memory_of_this_process,
    print_run,
    read_job,
    versions_of,
)

IMAGE_TOKEN = "<|image_pad|>"


class Clock:
    """A streamer: notes when each token comes out of ``generate``. The first ``put`` is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.token_ids: list[int] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.token_ids.extend(int(token) for token in value.reshape(-1))

    def end(self) -> None:
        """Part of the streamer's interface; nothing is left to do."""


def main() -> None:
    job = read_job()
    started = time.perf_counter()
    import torch
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    imported = time.perf_counter()
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.folder)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(job.folder)
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(job.folder, dtype=getattr(torch, job.dtype))
    model = model.to(job.device).eval()
    # No end token: every round decodes the same number of tokens, whatever the model says.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    loaded = time.perf_counter()
    rss_loaded = memory_of_this_process("VmRSS")

    rounds: list[RequestPhases] = []
    for _ in range(job.rounds + 1):
        inputs, image_tokens, preprocess_s = prepare(job, tokenizer, image_processor, torch)
        clock = Clock()
        start = time.perf_counter()
        model.generate(**inputs, max_new_tokens=job.tokens, do_sample=False, streamer=clock)
        rounds.append(RequestPhases(preprocess_s, clock.times[0] - start, clock.times[-1] - clock.times[0]))
    print_run(
        Run(
            engine="transformers",
            import_s=imported - started,
            load_s=loaded - imported,
            rounds=rounds[1:],
            token_ids=clock.token_ids,
            prompt_tokens=int(inputs["input_ids"].shape[1]),
            image_tokens=image_tokens,
            rss_loaded=rss_loaded,
            rss_peak=memory_of_this_process("VmHWM"),
            gpu_bytes=torch.cuda.max_memory_allocated() if job.device != "cpu" else 0,
            versions=versions_of("torch", "transformers", "tokenizers", "pillow"),
        )
    )


def prepare(job: Job, tokenizer: Any, image_processor: Any, torch: Any) -> tuple[dict[str, Any], int, float]:
    """The file and the question as tensors on the device, the picture's tokens, and the seconds that took."""
    from PIL import Image

    start = time.perf_counter()
    picture = Image.open(Path(job.picture)).convert("RGB")
    pixels = image_processor(images=[picture], return_tensors="pt")
    image_tokens = int(pixels["image_grid_thw"].prod()) // image_processor.merge_size**2
    content = [{"type": "image"}, {"type": "text", "text": job.question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace(IMAGE_TOKEN, IMAGE_TOKEN * image_tokens)
    encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    is_picture = encoded["input_ids"] == tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    inputs = {**encoded, **pixels, "mm_token_type_ids": is_picture.int()}
    inputs = {name: tensor.to(job.device) for name, tensor in inputs.items()}
    if job.device != "cpu":
        torch.cuda.synchronize()
    return inputs, image_tokens, time.perf_counter() - start


if __name__ == "__main__":
    main()
