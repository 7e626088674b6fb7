// Settings that are sampling controls. Written by scripts/write_configs from inflight/core/request/sampling_config.py: change that.

const SAMPLING_GROUPS = [
  {
    "title": "Choice of tokens",
    "settings": [
      {
        "field": "temperature",
        "label": "Temperature",
        "usual": "1",
        "hint": "0 always takes the likeliest token; the higher, the more often others are chosen."
      },
      {
        "field": "top_n_sigma",
        "label": "Top n sigma",
        "usual": "0",
        "hint": "Tokens whose logits are more than this many standard deviations below the highest are left out."
      },
      {
        "field": "top_k",
        "label": "Top k",
        "usual": "all",
        "hint": "The choice is among this many of the likeliest tokens."
      },
      {
        "field": "top_p",
        "label": "Top p",
        "usual": "1",
        "hint": "The choice is among the likeliest tokens that have this probability together."
      },
      {
        "field": "min_p",
        "label": "Min p",
        "usual": "0",
        "hint": "Tokens with less than this share of the likeliest token’s probability are left out."
      },
      {
        "field": "seed",
        "label": "Seed",
        "usual": "random",
        "hint": "The same seed and the same request give the same answer again."
      }
    ]
  },
  {
    "title": "Repetition",
    "settings": [
      {
        "field": "repetition_penalty",
        "label": "Repetition penalty",
        "usual": "1",
        "hint": "Above 1, tokens of the prompt and of the answer become less likely to come again."
      },
      {
        "field": "presence_penalty",
        "label": "Presence penalty",
        "usual": "0",
        "hint": "Tokens become less likely once the prompt or the answer has used them, however often."
      },
      {
        "field": "frequency_penalty",
        "label": "Frequency penalty",
        "usual": "0",
        "hint": "Tokens become less likely each time that the prompt or the answer has used them."
      }
    ]
  }
];

/** Fields that the client of OpenAI has no argument for. */
const EXTRA_FIELDS = ["allowed_token_ids", "early_stopping", "length_penalty", "min_p", "min_tokens", "no_repeat_ngram_size", "repetition_penalty", "top_k", "top_n_sigma"];
