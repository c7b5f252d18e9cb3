"""How mini, the checkpoint that ships with vlfit, is made: `README.md` beside this file tells the story."""
