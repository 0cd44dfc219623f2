"""A tokenizer of the models of `tiny`: a token a letter."""

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def letter_tokenizer() -> PreTrainedTokenizerFast:
    ids = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(32 + i): 3 + i for i in range(93)}}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
