"""What tools for the home send, request by request, as their source has it: each is answered, not refused.

The bodies were written from the code that is named beside each; pictures and prompts are ours. docs/home.md
says what else was tried.
"""

import base64
import json
from typing import Any

import httpx
import pytest

from tests.pictures import picture
from tests.server.harness import Running
from tests.server.scripted import ScriptedBackend
from vlfit.api.conversation import ImagePart, TextPart

JPEG = base64.b64encode(picture(64, 48, "JPEG")).decode()
OTHER = base64.b64encode(picture(48, 64, "JPEG", seed=1)).decode()
URL = f"data:image/jpeg;base64,{JPEG}"
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "confidence": {"type": "number"}},
    "required": ["title", "confidence"],
}
MODEL = "scripted"
ANSWER = "A red circle 🙂."

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # github.com/blakeblackshear/frigate frigate/genai/plugins/ollama.py, _send
    "frigate by ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": "Describe.\nFrame 1\n[img]\nFrame 2\n[img]",
                    "images": [JPEG, OTHER],
                }
            ],
            "options": {"temperature": 0.5, "repeat_penalty": 1.05, "presence_penalty": 0.3},
            "format": SCHEMA,
            "stream": False,
        },
    ),
    # the same file, _count_prompt_tokens
    "frigate counts tokens by ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": ".", "images": [JPEG]}],
            "options": {"temperature": 0.5, "num_predict": 1},
            "stream": False,
        },
    ),
    # frigate/genai/plugins/llama_cpp.py, _send; with a template that reads enable_thinking
    "frigate by llama.cpp": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Describe."},
                        {"type": "text", "text": "Frame 1"},
                        {"type": "image_url", "image_url": {"url": URL}},
                    ],
                }
            ],
            "response_format": {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA}},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    # github.com/valentinfrlch/ha-llmvision custom_components/llmvision/providers.py, Ollama
    "ha-llmvision by ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "Image 1:", "images": [JPEG]},
                {"role": "user", "content": "camera_door:", "images": [OTHER]},
                {"role": "user", "content": "Describe the images."},
            ],
            "stream": False,
            "options": {"num_predict": 100, "temperature": 0.2},
        },
    ),
    # the same file, LocalAI and OpenAI
    "ha-llmvision by openai": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Image 1:"},
                        {"type": "image_url", "image_url": {"url": URL}},
                        {"type": "text", "text": "Describe the images."},
                    ],
                }
            ],
            "max_tokens": 100,
            "temperature": 0.2,
        },
    ),
    # github.com/photoprism/photoprism internal/ai/vision/api_request.go and ollama/README.md
    "photoprism labels by ollama": (
        "/api/generate",
        {
            "id": "3487da77-246e-4b4c-9437-67507177bcd7",
            "model": MODEL,
            "system": "You are a PhotoPrism vision model.",
            "prompt": "Return labels as JSON.",
            "suffix": "",
            "format": "json",
            "options": {"temperature": 0.1, "top_p": 0.9, "stop": ["\n\n"]},
            "stream": False,
            "images": [JPEG],
        },
    ),
    "photoprism caption by ollama": (
        "/api/generate",
        {
            "id": "3487da77-246e-4b4c-9437-67507177bcd7",
            "model": MODEL,
            "prompt": "Describe the picture in one sentence.",
            "suffix": "",
            "options": {"temperature": 0.2},
            "think": False,
            "stream": False,
            "images": [JPEG],
        },
    ),
    # internal/ai/vision/openai/transport.go
    "photoprism by responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {
                    "role": "system",
                    "type": "message",
                    "content": [{"type": "input_text", "text": "You label pictures."}],
                },
                {
                    "role": "user",
                    "type": "message",
                    "content": [
                        {"type": "input_text", "text": "Return labels."},
                        {"type": "input_image", "image_url": URL, "detail": "low"},
                    ],
                },
            ],
            "text": {"format": {"type": "json_schema", "name": "labels", "schema": SCHEMA, "strict": True}},
            "max_output_tokens": 1024,
        },
    ),
    # github.com/karakeep-app/karakeep packages/shared/inference/ollama.ts
    "karakeep by ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "format": {**SCHEMA, "$schema": "http://json-schema.org/draft-07/schema#"},
            "stream": True,
            "options": {"num_ctx": 2048, "num_predict": 2048},
            "messages": [{"role": "user", "content": "Tag this.", "images": [JPEG]}],
        },
    ),
    # packages/shared/inference/openai.ts
    "karakeep by openai": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "max_tokens": 2048,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "schema",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {"tags": {"type": "array", "items": {"type": "string"}}},
                        "required": ["tags"],
                        "additionalProperties": False,
                        "$schema": "http://json-schema.org/draft-07/schema#",
                    },
                },
            },
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Tag this."},
                        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                    ],
                }
            ],
        },
    ),
    # github.com/icereed/paperless-gpt ocr/llm_provider.go over github.com/tmc/langchaingo
    # llms/ollama/internal/ollamaclient/types.go
    "paperless-gpt by ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Transcribe the text.", "images": [JPEG]}],
            "format": "",
            "options": {"num_ctx": 4096, "num_predict": 100, "temperature": 0},
            "stream": True,
        },
    ),
    "paperless-gpt by openai": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": URL}},
                        {"type": "text", "text": "Transcribe the text."},
                    ],
                }
            ],
            "max_completion_tokens": 100,
        },
    ),
    # github.com/stavsap/comfyui-ollama CompfyuiOllama.py, ollama_generate_v2
    "comfyui-ollama": (
        "/api/generate",
        {
            "model": MODEL,
            "system": "You are an AI artist.",
            "prompt": "Describe this image in detail",
            "images": [JPEG],
            "think": False,
            "format": "",
            "stream": False,
            "options": {"seed": 42, "repeat_last_n": 64, "num_predict": -1, "tfs_z": 1},
        },
    ),
    # github.com/open-webui/open-webui backend/open_webui/routers/openai.py passes on what its page sends
    "open webui by openai": (
        "/v1/chat/completions",
        {
            "stream": True,
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": URL}},
                    ],
                }
            ],
            "stream_options": {"include_usage": True},
        },
    ),
    # docs.claude.com: Messages API; Claude Code asks so with its own system prompt and tools
    "claude code": (
        "/v1/messages?beta=true",
        {
            "model": MODEL,
            "max_tokens": 1024,
            "stream": True,
            "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/jpeg", "data": JPEG},
                        },
                        {"type": "text", "text": "What is this?", "cache_control": {"type": "ephemeral"}},
                    ],
                }
            ],
            "tools": [
                {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object"}},
            ],
            "metadata": {"user_id": "user_1"},
            "temperature": 1,
        },
    ),
}


def words_of(path: str, answer: httpx.Response) -> str:
    """The text of an answer of any dialect, streamed or not."""
    text = answer.text
    if path.startswith("/api/"):
        lines = [json.loads(line) for line in text.splitlines()]
        assert lines[-1]["done"] is True
        return "".join(
            line.get("message", {}).get("content", "") or line.get("response", "") for line in lines
        )
    if text.startswith(("data:", "event:")):
        events = [
            json.loads(line[5:])
            for line in text.splitlines()
            if line.startswith("data:") and not line.endswith("[DONE]")
        ]
        if path.startswith("/v1/messages"):
            return "".join(event.get("delta", {}).get("text", "") for event in events)
        deltas = [choice["delta"] for event in events for choice in event.get("choices", [])]
        return "".join(delta.get("content") or "" for delta in deltas)
    body = answer.json()
    if path == "/v1/responses":
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("name", CASES)
def test_is_answered(server: Running, scripted: ScriptedBackend, name: str) -> None:
    path, body = CASES[name]
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    words = words_of(path, answer)
    assert words == ANSWER or (body.get("options", {}).get("num_predict") == 1 and ANSWER.startswith(words))
    conversation, _ = scripted.asked[-1]
    pictures = [part for message in conversation for part in message.parts if isinstance(part, ImagePart)]
    assert [each.data for each in pictures][:1] == [base64.b64decode(JPEG)]


def test_frigates_frames_stand_beside_their_captions(server: Running, scripted: ScriptedBackend) -> None:
    path, body = CASES["frigate by ollama"]
    httpx.post(f"{server.url}{path}", json=body, timeout=60)
    parts = scripted.asked[-1][0][0].parts
    assert [part.text if isinstance(part, TextPart) else "picture" for part in parts] == [
        "Describe.\nFrame 1\n",
        "picture",
        "\nFrame 2\n",
        "picture",
    ]


def test_pictures_without_a_place_come_first(server: Running, scripted: ScriptedBackend) -> None:
    images = [JPEG, OTHER]
    message = {"role": "user", "content": "[img] and text", "images": images}
    httpx.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": [message]}, timeout=60)
    parts = scripted.asked[-1][0][0].parts
    pictures = [part.data for part in parts if isinstance(part, ImagePart)]
    assert pictures == [base64.b64decode(each) for each in (OTHER, JPEG)]
    bad = {"role": "user", "content": "[img] and text", "images": ["bm90IGEgcGljdHVyZQ==", OTHER]}
    refused = httpx.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": [bad]}, timeout=60)
    assert refused.status_code == 400


@pytest.mark.parametrize("path", ["/api/tags", "/api/version", "/api/ps", "/v1/models", "/props"])
def test_what_they_ask_first(server: Running, path: str) -> None:
    """Frigate: /v1/models and /props; Open WebUI: /api/tags, /api/version and /api/ps."""
    assert httpx.get(f"{server.url}{path}", timeout=30).status_code == 200


def test_what_frigate_and_open_webui_ask_of_a_model(server: Running) -> None:
    told = httpx.post(f"{server.url}/api/show", json={"model": MODEL}, timeout=30)
    assert "vision" in told.json()["capabilities"]
