"""Which content a model's folder had when a run began, so that a changed one is refused when the run goes on."""

from shoal.core.errors import ShoalError
from shoal.models.hf_folder import fingerprint_hf_config, fingerprint_hf_folder, is_hf_model
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder

MODEL_NOTE = "model"


def note_model_content(folder: RunFolder, recipe: Recipe) -> None:
    """Write down what the model's folder holds, where the recipe names one of Hugging Face."""
    if is_hf_model(recipe.model):
        content, config = fingerprint_hf_folder(recipe.model), fingerprint_hf_config(recipe.model)
        folder.write_note(MODEL_NOTE, {"content": content, "config": config})


def refuse_changed_content(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse to go on with a run whose model's folder holds something else than when it began."""
    if is_hf_model(recipe.model):
        refuse_other_note(folder, recipe, "content", fingerprint_hf_folder(recipe.model))


def refuse_changed_config(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse to load a trained model into a folder's model that is built otherwise by now."""
    if is_hf_model(recipe.model):
        refuse_other_note(folder, recipe, "config", fingerprint_hf_config(recipe.model))


def refuse_other_note(folder: RunFolder, recipe: Recipe, key: str, now: str) -> None:
    noted = (folder.read_note(MODEL_NOTE) or {}).get(key, now)
    if noted != now:
        what = "its config differs" if key == "config" else "its config, weights or tokenizer differ"
        problem = f"The folder of {recipe.model[:80]} is not what it was when {folder.path} was begun: {what}."
        raise ShoalError("other-recipe", problem, "Put the folder back as it was, or start anew with another `out`.")
