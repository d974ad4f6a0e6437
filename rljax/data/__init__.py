"""Text and files on one side, token arrays on the other; nothing here touches a device.

The flow: `sources` (files, tasks -> checked records) -> `prompts` (records -> token ids, padded
arrays), with `tokenizer` and `chat` for the text; `loader` decides which records come when.
"""
