"""An object store on this machine: moto's S3, whose requests may also come in Google's words."""

import contextlib
import json
import logging
import threading

SIGNED = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"


LOST: list[str] = []
"""Ends of the names of objects: the answer to the next PUT of one is lost, and the PUT done."""


def losing_answers(app):
    """The server behind a network that loses what is in `LOST`, each once."""

    def answered(environ, start):
        name = next((name for name in LOST if environ["PATH_INFO"].endswith(name)), None)
        if environ["REQUEST_METHOD"] != "PUT" or name is None:
            return app(environ, start)
        LOST.remove(name)
        b"".join(app(environ, lambda *_: None))
        start("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]

    return answered


def in_googles_words(app):
    """Google's XML API is S3's, but for the names of what a conditional PUT is about, and for who signs."""

    def translated(environ, start):
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = SIGNED
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if generation is not None:
            environ |= {"HTTP_IF_NONE_MATCH": "*"} if generation == "0" else {"HTTP_IF_MATCH": f'"{generation}"'}

        def begin(status, headers, *rest):
            tags = [("x-goog-generation", value.strip('"')) for name, value in headers if name.lower() == "etag"]
            return start(status, [*headers, *tags], *rest)

        return app(environ, begin)

    return translated


@contextlib.contextmanager
def served():
    """The server, with an empty bucket called `bucket`; gives the environment variables to reach it."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = losing_answers(in_googles_words(DomainDispatcherApplication(create_backend_app)))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    aws = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    google = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )
    client.create_bucket(Bucket="bucket")
    client.close()
    yield aws | {
        "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(google),
    }  # fmt: skip
    server.shutdown()
    server.server_close()
