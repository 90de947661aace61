"""Part of the double of SGLang, see tests/doubles/sglang/srt/managers/tokenizer_manager.py."""
