//! Chat templates from strangers, with a chat for each to render.

use fornax_text::{Chat, ChatTemplate, Tokenizer};
use serde_json::json;

/// A few turns, one of which spells a control token of `bytes_tokenizer`.
pub fn chat() -> Chat {
    let mut chat = Chat::new(vec![
        json!({"role": "user", "content": "Hi <EOS>"}),
        json!({"role": "assistant", "content": "Hello"}),
        json!({"role": "user", "content": "Why?"}),
    ]);
    chat.now = "2026-11-05T07:08:09[UTC]".parse().expect("it is a time");
    chat
}

/// Renders the chat with this template, and makes tokens of it. Whether there is a prompt.
pub fn template(source: &str, chat: &Chat, tokenizer: &Tokenizer) -> bool {
    let rendered = ChatTemplate::new(source).and_then(|template| template.render(chat, tokenizer));
    let Ok(prompt) = rendered else { return false };
    tokenizer.encode_chat(&prompt).expect("whatever was rendered has tokens");
    true
}
