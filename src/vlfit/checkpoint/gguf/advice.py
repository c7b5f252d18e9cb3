"""What helps against failures of GGUF files: said when one is opened, and by the doctor of others' logs."""

FETCH_AGAIN = "Fetch this file again: it is damaged, or its download was cut off."
OTHER_TENSORS = (
    "Fetch this file again, or get another conversion of the model: its metadata and tensors do not agree."
)
KEEP_NAMES = "Fetch all parts of the model, and keep the names that they were published with."
NAME_MMPROJ = "Name the mmproj file that came with this model: --mmproj FILE."
PUT_MMPROJ = "Name the mmproj file that came with the model: --mmproj FILE. One in the same folder is found."
OTHER_LAYOUT = (
    "vlfit reads llama.cpp's layout: ollama pull hf.co/unsloth/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M has it, and "
    "so has vlfit pull unsloth/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M."
)
OTHER_CONVERSION = "It was converted by an old llama.cpp. Get another conversion of the model."
OTHER_METADATA = "Fetch this file again, or get another conversion of the model."
OTHER_VOCABULARY = "Its conversion went wrong. Get another conversion of the model."
