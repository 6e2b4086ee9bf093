from tierd.daemon.models.errors import ModelFileError


def test_it_is_a_value_error():
    assert issubclass(ModelFileError, ValueError)
