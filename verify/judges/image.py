"""Judges an image: what its layers make together, as a container of it would see it.

1. The image that the tag names is read from the layout, every digest compared.
2. Its layers are laid over each other into a root that is only an index.
3. The papers of the layer, if they are there, say what is claimed.
4. The vLLM of the root is judged as an environment is, with the image's own variables.

A layer without its base is no vLLM: it is judged for what it holds, and the verdict is at
best *undecided* unless the caller says that this is meant (``--layer``).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from verify import interpreter
from verify.anchor import PACKAGE
from verify.checks import attestation, bundle, image, package, tree
from verify.digest import Digest, ReadError
from verify.errors import FormatError
from verify.expect import Composition, Origin
from verify.filesystem import read_file
from verify.judges.case import Case, Digests, Options, composition_of
from verify.judges.site import judge_environment, judge_installed_connector, owners_of, vllm_names
from verify.oci.layer import COMPRESSION, DamagedError, Entry, Layer
from verify.oci.layout import (
    Descriptor,
    ImageConfig,
    Layout,
    LayoutError,
    Manifest,
    compare,
)
from verify.oci.merged import MergedRoot
from verify.pins import Base
from verify.receipt import Receipt
from verify.record import RecordFile
from verify.report import Recorder, Report

_SITE_NAMES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class _Papers:
    """What the layer brings to say of itself: the folder, its files, and the parsed receipt."""

    folder: Path
    digests: Digests
    receipt: Receipt | None
    attestations: bytes | None

    @property
    def receipt_sha256(self) -> str | None:
        found = self.digests.get(bundle.RECEIPT)
        return found.sha256 if isinstance(found, Digest) else None


def judge_image(reference: Path, options: Options) -> Report:
    """Judge the image that ``reference``, ``LAYOUT:TAG`` or ``LAYOUT`` with one image, names.

    Raises:
        ConfigError: when the layout, the tag, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    folder, tag = _split(reference)
    layout = Layout(folder)
    case = Case("image", str(reference), options, [folder])
    # (1)
    try:
        index = layout.index()
        descriptor = layout.image(index, tag, options.platform)
        case.rec.passed("IMAGE-1", f"sha256:{descriptor.sha256}")
        manifest = layout.manifest(descriptor)
        config = layout.config(manifest.config)
    except LayoutError as error:
        _report(error, case.rec)
        return case.report()
    with ExitStack() as stack:
        # (2)
        root = _merge(case, layout, manifest, config, stack)
        if root is None:
            return case.report()
        site = _site(root, options.site, case.rec)
        python = _python(root, site) if site is not None else None
        whole = site is not None and (
            options.layer
            or (python is None and not owners_of(root, site, "vllm", vllm_names(case)))
        )
        # (3)
        papers = _papers(case, root, required=whole)
        receipt = papers.receipt if papers is not None else None
        # (4)
        if site is not None and whole:
            _judge_layer(case, root, site, papers)
        elif site is not None:
            _judge_whole(case, root, site, python, config, receipt)
    if case.anchor is not None:
        sha256 = papers.receipt_sha256 if papers is not None else None
        told = image.facts(case.anchor, receipt, sha256)
        image.judge_facts(manifest, config, case.base, told, case.rec, whole=whole)
    lines = papers.attestations if papers is not None else None
    image.judge_referrers(layout, index, descriptor, lines, case.rec, whole=whole)
    case.rec.passed("IMAGE-2", f"{len(manifest.layers)} layers")
    return case.report()


def _split(reference: Path) -> tuple[Path, str | None]:
    """Split at the first colon, as skopeo and buildah do."""
    if reference.is_dir():
        return reference, None
    folder, _, tag = str(reference).partition(":")
    return Path(folder), tag or None


def _merge(
    case: Case, layout: Layout, manifest: Manifest, config: ImageConfig, stack: ExitStack
) -> MergedRoot | None:
    """Lay the layers over each other; None when one of them is not what it must be."""
    rec, root, usable = case.rec, MergedRoot(), True
    listed = config.diff_ids
    if len(listed) != len(manifest.layers):
        expected, actual = f"{len(manifest.layers)} diff_ids", f"{len(listed)}"
        message = "the config lists another number of layers than the manifest"
        rec.fail("IMAGE-3", manifest.config.path, message, expected=expected, actual=actual)
    for number, descriptor in enumerate(manifest.layers):
        layer = _open(layout, descriptor, stack, rec)
        if layer is None:
            usable = False
            continue
        damage = ""
        entries: list[Entry] = []
        try:
            entries.extend(layer.entries(case.options.progress))
        except DamagedError as error:
            damage = str(error)
        try:
            compare(descriptor, layer.sha256, layer.packed_size)
        except LayoutError as error:
            _report(error, rec)
            usable = False
            continue
        if damage:
            message = "the layer cannot be read to its end"
            rec.fail("IMAGE-4", descriptor.path, message, expected="a tar archive", actual=damage)
            usable = False
            continue
        if number < len(listed) and layer.diff_id != listed[number]:
            message = "the config names other plain bytes for this layer"
            rec.fail(
                "IMAGE-3",
                descriptor.path,
                message,
                expected=f"sha256:{listed[number]}",
                actual=f"sha256:{layer.diff_id}",
            )
        for defect in root.apply(layer, entries):
            message = f"layer {number + 1} of {len(manifest.layers)}: {defect.message}"
            expected, actual = defect.expected or "", defect.actual or ""
            rec.fail(defect.check, defect.path, message, expected=expected, actual=actual)
    if not usable:
        return None
    for check in ("IMAGE-3", "IMAGE-4"):
        rec.passed(check, f"{len(manifest.layers)} layers")
    return root


def _open(layout: Layout, descriptor: Descriptor, stack: ExitStack, rec: Recorder) -> Layer | None:
    compression = COMPRESSION.get(descriptor.media_type, "")
    if compression == "zstd":
        rec.undecided(
            "IMAGE-2",
            descriptor.path,
            "the layer is compressed with zstd, which this judge does not read",
            expected="a plain or gzip-compressed layer",
            actual=descriptor.media_type,
            hint="copy the image first: skopeo copy --dest-compress-format gzip SRC oci:DIR:TAG",
        )
    elif not compression:
        message = "an unknown kind of layer"
        expected = ", ".join(sorted(COMPRESSION))
        actual = descriptor.media_type
        rec.fail("IMAGE-2", descriptor.path, message, expected=expected, actual=actual)
    else:
        try:
            return stack.enter_context(Layer(layout.folder / descriptor.path, compression))
        except ReadError as error:
            message = "a layer cannot be read"
            expected, actual = error.expected, error.actual
            rec.fail("IMAGE-2", descriptor.path, message, expected=expected, actual=actual)
    return None


def _site(root: MergedRoot, asked: str | None, rec: Recorder) -> Path | None:
    """Return the site directory to judge."""
    places = [folder.parent for folder in root.folders("vllm") if folder.parent.name in _SITE_NAMES]
    there = ", ".join(map(str, places)) or "none"
    if asked is not None:
        site = root.real(Path("/", asked.strip("/")))
        if root.is_dir(site / "vllm"):
            return site
        rec.fail("IMAGE-5", str(site), "no vLLM here", expected="vllm/", actual=f"vLLM in {there}")
    elif len(places) == 1:
        return places[0]
    else:
        message = "vLLM is in several places" if places else "the image has no vLLM"
        hint = "name the site directory with --site"
        rec.fail("IMAGE-5", None, message, expected="one place", actual=there, hint=hint)
    return None


def _python(root: MergedRoot, site: Path) -> Path | None:
    """Return the interpreter whose site directory this is.

    Debian's Python, in /usr, has its site directory for other than Debian's packages below
    /usr/local.
    """
    prefix = site.parents[2]
    debian = site.name == "dist-packages" and prefix == Path("/usr/local")
    for name in (site.parent.name, "python3"):
        python = (Path("/usr") if debian else prefix) / "bin" / name
        if root.is_file(python):
            return python
    return None


def _papers(case: Case, root: MergedRoot, *, required: bool) -> _Papers | None:
    """Judge what lies below ``/usr/share/sparkcache``, if anything does."""
    rec, anchor = case.rec, case.anchor
    share = Path("/", image.SHARE)
    target = anchor.pins.target if anchor is not None else None
    names = sorted(child.name for child in root.children(share))
    for name in names:
        if target not in (None, name):
            message = "papers of another target"
            rec.fail("IMAGE-7", f"{image.SHARE}/{name}", message, expected=target, actual=name)
    if target is None and len(names) == 1:
        target = names[0]
    folder = share / (target or "none")
    if not root.is_dir(folder):
        if required:
            message = "the layer does not bring its papers"
            rec.fail("IMAGE-7", image.SHARE, message, expected="a receipt", actual="none")
        else:
            rec.note("IMAGE-7", None, "the image does not hold the papers of a layer")
        demands = case.options.attestations
        if demands.required or demands.trust is not None:
            message = "the image has no attestations, and they are required"
            rec.undecided("ATT-1", None, message, expected="a file", actual="none")
        return None
    holder = root.hold(folder)
    digests = holder.digests((), case.options.progress)
    part = rec.below(str(folder)[1:])
    tree.judge_defects(holder, part)
    tree.judge_unreadable(holder, digests, part)
    receipt = bundle.read_receipt(holder, digests, part)
    if receipt is not None:
        pinned = anchor.pins.contract_sha256 if anchor is not None else None
        image.judge_papers(digests, receipt, pinned, part)
        if anchor is not None and case.basis is not None:
            bundle.judge_receipt(receipt, anchor, part)
        files = image.receipt_files(receipt, digests.get(bundle.RECEIPT))
        wheels = [name for name in files if name.startswith("vllm") and name.endswith(".whl")]
        wheel = files[wheels[0]] if len(wheels) == 1 else None
        bundle.judge_bom(holder, wheel, receipt.local_version, part)
        attestation.judge_attestations(
            holder, files, receipt, anchor, case.options.attestations, _layout_of(case), part
        )
    rec.absorb(part)
    try:
        lines = holder.read(bundle.ATTESTATIONS) if bundle.ATTESTATIONS in digests else None
    except ReadError:
        lines = None
    return _Papers(folder, digests, receipt, lines)


def _layout_of(case: Case) -> Path:
    return _split(Path(case.subject))[0]


def _judge_whole(
    case: Case,
    root: MergedRoot,
    site: Path,
    python: Path | None,
    config: ImageConfig,
    receipt: Receipt | None,
) -> None:
    """Judge the vLLM that the image's interpreter would import."""
    if python is None:
        case.rec.undecided(
            "IMAGE-5",
            str(site),
            "the image has no interpreter for this site directory",
            expected="a Python beside it",
            actual="none",
        )
        env = interpreter.of_folder(site, root)
    else:
        env = interpreter.of_python(python, _environ(root, config), root)
        case.rec.passed("IMAGE-5", f"{site}, imported by {python}")
    bases = case.basis.pins.bases if case.basis is not None else {}
    if receipt is not None and receipt.base in bases and case.options.base is None:
        # which base it is for, the layer says; that it is this one, the judgement of its files
        case.options = replace(case.options, base=receipt.base)
    judge_environment(case, env, [site], receipt)


def _environ(root: MergedRoot, config: ImageConfig) -> dict[str, str]:
    """Return the variables of a container's process: engines set HOME from the user's entry."""
    user = config.user.partition(":")[0] or "root"
    home = "/root" if user in ("root", "0") else "/"
    try:
        users = read_file(root, root.real(Path("/etc/passwd")), "/etc/passwd")
    except ReadError:
        users = b""
    for line in users.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) == 7 and user in (fields[0], fields[2]):
            home = fields[5]
    return {"HOME": home, **config.environ}


def _judge_layer(case: Case, root: MergedRoot, site: Path, papers: _Papers | None) -> None:
    """Judge a layer by itself: what is laid over a release, and nothing beside it."""
    rec = case.rec
    if not case.options.layer:
        rec.undecided(
            "IMAGE-5",
            None,
            "this is a layer to be laid over a base image, and the base is not there",
            expected="a base image with vLLM and Python below the layer",
            actual="the layer alone",
            hint="judge the image that was built with it, or say that the layer is meant: --layer",
        )
    rec.passed("IMAGE-5", f"the layer by itself, for {site}")
    receipt = papers.receipt if papers is not None else None
    if case.basis is not None:
        bases = case.basis.pins.bases
        known = receipt is not None and receipt.base in bases
        case.base = receipt.base if receipt is not None and known else case.options.base
        chosen = bases.get(case.base or "", next(iter(bases.values())))
        _judge_laid(case, root, site, chosen)
    if not owners_of(root, site, PACKAGE, {PACKAGE}):
        message = "the layer does not bring the connector"
        rec.fail("PKG-13", None, message, expected="its dist-info directory", actual="none")
    judge_installed_connector(case, interpreter.of_folder(site, root), receipt)
    known_paths = _connectors_files(root, site)
    own = [str(site / "vllm")[1:] + "/"]
    if papers is not None:
        own.append(str(papers.folder)[1:] + "/")
    for path, node in root.walk():
        if path not in known_paths and not path.startswith(tuple(own)):
            message = "a file beyond what the layer lays over the base"
            rec.fail("TREE-3", path, message, expected="no file", actual=f"a {node.kind}")
    rec.passed("TREE-3", "the layer holds nothing else")


def _judge_laid(case: Case, root: MergedRoot, site: Path, chosen: Base) -> None:
    """Judge the touched files and modules; everything else of vLLM is the base's."""
    assert case.basis is not None
    case.options = replace(case.options, in_place=True)
    composition = composition_of(case, case.basis, chosen, None)
    laid = (Origin.PATCH, Origin.MODULE)
    touched = Composition(
        {path: each for path, each in composition.files.items() if each.origin in laid},
        composition.deleted,
    )
    holder = root.hold(site, ("vllm",))
    digests = holder.digests((), case.options.progress)
    tree.judge_files(
        holder, digests, touched, case.rec, allowed=lambda _path: False, patched=True, whole=False
    )
    package.judge_modes(holder, case.rec)


def _connectors_files(root: MergedRoot, site: Path) -> set[str]:
    """Return the files that the connector's RECORD lists, its commands outside included."""
    found: set[str] = set()
    for owner in owners_of(root, site, PACKAGE, {PACKAGE}):
        place = f"{owner}/RECORD"
        found.add(str(site / place)[1:])
        try:
            rows = RecordFile.parse(read_file(root, site / place, place)).rows
        except (ReadError, FormatError):
            continue
        found.update(str(root.real(site / path))[1:] for path in rows)
    return found


def _report(error: LayoutError, rec: Recorder) -> None:
    expected, actual = error.expected, error.actual
    rec.fail(error.check, error.path, error.problem, expected=expected, actual=actual)
