"""Installation of headrank: the method, its command, and the extras for training, GPUs and Lucene."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "headrank" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
).group(1)

# What reranking, retrieval, head selection, evaluation and the embedded model need. Versions that CI tests:
# constraints.txt.
CORE = [
    "torch>=2.6",
    "transformers>=5.0",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "jinja2",  # chat templates; transformers does not require it
    "numpy",
    "filelock",
    "tqdm",
    "rich",
    "pydantic>=2.7",  # study files: typed settings with a line for every mistake
    "pyyaml",
    "bm25s>=0.2",
    "PyStemmer",
    "ir-measures>=0.4",
    "scipy",  # the t-test's distribution
    "matplotlib>=3.8",
    "gguf>=0.10",  # reads the embedded model; transformers asks for accelerate along with it
    "accelerate",
]
# Megatron-Core writes checkpoints with psutil and does not declare it: without it the writers die and the save hangs.
# From 0.18 on, which want Python 3.12, it imports triton at once: a torch for GPUs brings it, one for CPUs does not.
# The range is
# megatron_patches.versions.TESTED's.
TRAIN = [
    "megatron-core>=0.16.1,<0.20",
    "triton; python_version >= '3.12' and sys_platform == 'linux'",
    "psutil",
    "tensorboard",
]
# Transformer Engine as megatron-core 0.16.1 asks for it (later releases name no version); plain "transformer-engine"
# breaks "import
# megatron.core". It is built against the torch that is there, so pip needs --no-build-isolation (docs/reproduction.md).
GPU = ["transformer-engine[pytorch]>=2.9,<2.12"]
LUCENE = ["pyserini>=1.0"]  # needs Java 21
DATASETS = ["ir_datasets>=0.5"]  # headrank benchmark prepare NAME --from ir_datasets
TEACHER = ["sentence-transformers>=5.0", "onnxruntime"]  # headrank label: cross-encoders as teachers
# headrank benchmark prepare hotpotqa --colbert: reads ColBERTv2's own checkpoint
COLBERT = ["sentence-transformers>=6.0"]
SERVE = ["fastapi", "uvicorn"]  # headrank serve
SERVER = [*SERVE, "openai"]  # what 'transformers serve' needs: the tests talk to a real OpenAI-compatible server
RAY = ["ray[data]>=2.40"]  # headrank rerank --ray, headrank index --ray
# what headrank/integrations adapts to, for its tests
INTEGRATIONS = ["langchain-core", "llama-index-core", "haystack-ai", "rerankers"]
# What headrank/integrations adapts to besides, for 'make test-integrations': too heavy for every test run.
HEAVY_INTEGRATIONS = ["mteb>=2.0", "beir>=2.0", "python-terrier>=1.0", "ranx>=0.3", *RAY]
# Clients of 'headrank serve' and a fuzzer, for its tests; pinned for Python 3.11 and later only: on 3.10 these tests
# are skipped.
CLIENTS = [
    f"{name}; python_version >= '3.11'"
    for name in (
        "cohere",
        "langchain-cohere",
        "llama-index-postprocessor-cohere-rerank",
        "llama-index-postprocessor-jinaai-rerank",
        "llama-index-postprocessor-tei-rerank",
        "mcp",
        "schemathesis",
    )
]
DEV = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "peft", "sentencepiece"]
DEV += [*SERVER, *TEACHER, *INTEGRATIONS, *CLIENTS]

setup(
    name="headrank",
    version=VERSION,
    description="Decoding-free passage reranking from the attention of preference-trained heads",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(
        include=["headrank", "headrank.*", "data_tools", "data_tools.*", "megatron_patches", "megatron_patches.*"]
    ),
    package_data={
        "headrank": ["**/*.json", "**/*.html", "**/*.css", "**/*.js", "reranking/embedded/adapter/*"],
        "data_tools": ["**/*.json"],
        "megatron_patches": ["**/*.json"],
    },
    install_requires=CORE,
    extras_require={
        "train": TRAIN,
        "gpu": TRAIN + GPU,
        "lucene": LUCENE,
        "datasets": DATASETS,
        "teacher": TEACHER,
        "colbert": COLBERT,
        "integrations": INTEGRATIONS + TEACHER,
        "serve": SERVE,
        "ray": RAY,
        "integrations-heavy": HEAVY_INTEGRATIONS + TEACHER,
        "dev": TRAIN + DEV,
    },
    entry_points={"console_scripts": ["headrank = headrank.commands:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Text Processing :: Indexing",
    ],
)
