// The dialog that asks for a larger total, of epochs or of trials, and resumes the run with it.
import {find} from "./common.js";

export function openMore(total) {
  find("#more-total").value = total;
  find("#more-problem").hidden = true;
  find("#more-dialog").showModal();
}

export function bindMore(resume) {
  find("#more-go").addEventListener("click", async () => {
    try {
      await resume(Number(find("#more-total").value));
      find("#more-dialog").close();
    } catch (problem) {
      find("#more-problem").textContent = problem.message;
      find("#more-problem").hidden = false;
    }
  });
}
