"""Reads OCI image layouts: their documents, their layers, and the root that these make.

:mod:`~verify.oci.layout` follows digests from the index to the layers, :mod:`~verify.oci.layer`
reads one layer's bytes and entries, :mod:`~verify.oci.merged` lays layers over each other. All of
it is untrusted: nothing is written anywhere, nothing is followed out of the image, and what is
not as it must be becomes a finding. Called by :mod:`verify.judges.image`.
"""
